// Makes an "hccl" backend of a gloo one.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace standin {
c10::intrusive_ptr<c10d::Backend> make_hccl(c10::intrusive_ptr<c10d::Backend> gloo);
}
