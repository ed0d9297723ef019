// The "hccl" process group: gloo on cpu views of npu tensors, refusing what HCCL refuses.
#include "hccl.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "call.h"

namespace standin {

using namespace c10d;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<Work>;
using After = std::function<void()>;

at::Tensor host(const at::Tensor& t) {
  STANDIN_CHECK(t.device().type() == kNPU, "No backend type associated with device type ", t.device().type(),
                ": hccl moves npu tensors, this one is on ", t.device());
  STANDIN_CHECK(!t.is_complex(), "hccl: unsupported data type ", t.scalar_type());
  return on_storage(host_view(t.storage()), c10::DispatchKey::CPU, t);
}

Tensors host(const Tensors& list) {
  Tensors hosts;
  for (auto& t : list) hosts.push_back(host(t));
  return hosts;
}

std::vector<Tensors> host(const std::vector<Tensors>& lists) {
  std::vector<Tensors> hosts;
  for (auto& list : lists) hosts.push_back(host(list));
  return hosts;
}

// What is left to do when gloo is done; it happens once, in whatever thread notices first.
struct Finish {
  After after;
  std::once_flag once;

  explicit Finish(After after) : after(std::move(after)) {}
  void operator()() {
    if (after) std::call_once(once, after);
  }
};

// Gloo's works as one, with npu tensors as its result.
struct HcclWork final : Work {
  std::vector<WorkPtr> parts;
  Tensors outputs;
  std::shared_ptr<Finish> finish;

  HcclWork(std::vector<WorkPtr> parts, Tensors outputs, After after)
      : parts(std::move(parts)),
        outputs(std::move(outputs)),
        finish(std::make_shared<Finish>(std::move(after))) {}

  bool isCompleted() override {
    bool all = std::all_of(parts.begin(), parts.end(), [](auto& w) { return w->isCompleted(); });
    if (all && isSuccess()) (*finish)();
    return all;
  }
  bool isSuccess() const override {
    return std::all_of(parts.begin(), parts.end(), [](auto& w) { return w->isSuccess(); });
  }
  bool wait(std::chrono::milliseconds timeout) override {
    for (auto& w : parts) w->wait(timeout);
    (*finish)();
    return true;
  }
  Tensors result() override { return outputs; }
  int sourceRank() const override { return parts.at(0)->sourceRank(); }

  // Completes with gloo's futures, in gloo's thread: DDP chains its division on it.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::vector<c10::Device> devices;
    if (!outputs.empty()) devices.push_back(outputs[0].device());
    auto type = c10::ListType::create(c10::TensorType::get());
    auto future = c10::make_intrusive<c10::ivalue::Future>(type, devices);
    auto waiting = std::make_shared<std::atomic<size_t>>(parts.size());
    for (auto& w : parts)
      w->getFuture()->addCallback([future, waiting, outputs = outputs, finish = finish](auto& part) {
        if (part.hasError()) return future->setErrorIfNeeded(part.exception_ptr());
        if (--*waiting) return;
        (*finish)();
        future->markCompleted(c10::IValue(outputs));
      });
    return future;
  }
};

WorkPtr work(std::vector<WorkPtr> parts, Tensors outputs, After after = nullptr) {
  return c10::make_intrusive<HcclWork>(std::move(parts), std::move(outputs), std::move(after));
}

struct Hccl final : Backend {
  c10::intrusive_ptr<Backend> gloo;

  explicit Hccl(c10::intrusive_ptr<Backend> inner)
      : Backend(inner->getRank(), inner->getSize()), gloo(std::move(inner)) {}

  const std::string getBackendName() const override { return "hccl"; }
  void setSequenceNumberForGroup() override { gloo->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo->getSequenceNumberForGroup(); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo->setTimeout(timeout); }
  void shutdown() override { gloo->shutdown(); }

  // What ProcessGroupHCCL.cpp says of reductions: these dtypes, nothing bitwise, and AVG is a sum
  // followed by a division. Returns that division.
  template <class Options>
  After reduction(Options& options, const Tensors& tensors) {
    static const std::set<at::ScalarType> reduces{at::kChar, at::kShort, at::kInt,  at::kLong,
                                                  at::kBool, at::kHalf,  at::kFloat, at::kBFloat16};
    for (auto& t : tensors)
      STANDIN_CHECK(reduces.count(t.scalar_type()), "hccl reduction: unsupported data type ", t.scalar_type());
    auto op = options.reduceOp;
    STANDIN_CHECK(op != ReduceOp::BAND && op != ReduceOp::BOR && op != ReduceOp::BXOR && op != ReduceOp::PREMUL_SUM,
                  "hccl reduction: bitwise operators and PREMUL_SUM are not supported");
    if (op != ReduceOp::AVG) return nullptr;
    options.reduceOp = ReduceOp::SUM;
    return [tensors, n = getSize()] {
      at::NoGradGuard no_grad;
      for (auto& t : tensors) t.div_(n);
    };
  }

  WorkPtr broadcast(Tensors& tensors, const BroadcastOptions& options) override {
    auto hosts = host(tensors);
    return work({gloo->broadcast(hosts, options)}, tensors);
  }

  WorkPtr allreduce(Tensors& tensors, const AllreduceOptions& given) override {
    auto options = given;
    auto hosts = host(tensors);
    auto after = reduction(options, tensors);
    return work({gloo->allreduce(hosts, options)}, tensors, after);
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const AllreduceCoalescedOptions& given) override {
    AllreduceOptions options;
    options.reduceOp = given.reduceOp;
    options.timeout = given.timeout;
    auto after = reduction(options, tensors);
    std::vector<WorkPtr> parts;
    for (auto& t : tensors) {
      Tensors hosts{host(t)};
      parts.push_back(gloo->allreduce(hosts, options));
    }
    return work(parts, tensors, after);
  }

  WorkPtr reduce(Tensors& tensors, const ReduceOptions& given) override {
    auto options = given;
    auto hosts = host(tensors);
    auto after = reduction(options, tensors);
    return work({gloo->reduce(hosts, options)}, tensors, after);
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const AllgatherOptions& options) override {
    auto to = host(outputs);
    auto from = host(inputs);
    return work({gloo->allgather(to, from, options)}, outputs.at(0));
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const AllgatherOptions& options) override {
    auto to = host(output), from = host(input);
    return work({gloo->_allgather_base(to, from, options)}, {output});
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const AllgatherOptions& options) override {
    std::vector<WorkPtr> parts;
    for (size_t i = 0; i < outputs.size(); i++) parts.push_back(_allgather_base(outputs[i], inputs[i], options));
    return work(parts, outputs);
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const GatherOptions& options) override {
    auto to = host(outputs);
    auto from = host(inputs);
    return work({gloo->gather(to, from, options)}, outputs.empty() ? inputs : outputs[0]);
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const ScatterOptions& options) override {
    auto to = host(outputs);
    auto from = host(inputs);
    return work({gloo->scatter(to, from, options)}, outputs);
  }

  // Reduces the whole input, then keeps this rank's part: slow, simple and right.
  WorkPtr keep_part(at::Tensor& output, at::Tensor whole, const ReduceScatterOptions& given) {
    AllreduceOptions options;
    options.reduceOp = given.reduceOp;
    options.timeout = given.timeout;
    Tensors tensors{whole};
    auto reduced = allreduce(tensors, options);
    return work({reduced}, {output}, [output, whole, rank = getRank(), n = getSize()] {
      at::NoGradGuard no_grad;
      output.copy_(whole.view({n, -1})[rank].view(output.sizes()));
    });
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const ReduceScatterOptions& options) override {
    at::NoGradGuard no_grad;
    return keep_part(output, input.clone(at::MemoryFormat::Contiguous), options);
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const ReduceScatterOptions& options) override {
    at::NoGradGuard no_grad;
    return keep_part(outputs.at(0), at::stack(inputs.at(0)), options);
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const ReduceScatterOptions& options) override {
    std::vector<WorkPtr> parts;
    for (size_t i = 0; i < outputs.size(); i++) parts.push_back(_reduce_scatter_base(outputs[i], inputs[i], options));
    return work(parts, outputs);
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const AllToAllOptions& options) override {
    STANDIN_CHECK(input.dim() > 0 && output.dim() > 0, "hccl all_to_all: a 0-dim tensor can't be split");
    STANDIN_CHECK(!input_sizes.empty() || input.size(0) % getSize() == 0,
                  "hccl all_to_all: dim 0 of ", input.sizes(), " does not divide by ", getSize(), " ranks and no split sizes are given");
    auto to = host(output), from = host(input);
    return work({gloo->alltoall_base(to, from, output_sizes, input_sizes, options)}, {output});
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const AllToAllOptions& options) override {
    at::NoGradGuard no_grad;  // gloo's list form wants even sizes, its flat form does not
    std::vector<int64_t> output_sizes, input_sizes;
    Tensors flat;
    for (auto& t : inputs) flat.push_back(t.reshape({-1})), input_sizes.push_back(t.numel());
    int64_t total = 0;
    for (auto& t : outputs) output_sizes.push_back(t.numel()), total += t.numel();
    auto from = at::cat(flat), to = at::empty({total}, outputs.at(0).options());
    auto sizes = output_sizes;  // the call may empty the lists it is given
    auto moved = alltoall_base(to, from, output_sizes, input_sizes, options);
    return work({moved}, outputs, [outputs, to, sizes] {
      at::NoGradGuard no_grad;
      auto parts = to.split_with_sizes(sizes);
      for (size_t i = 0; i < outputs.size(); i++) outputs[i].copy_(parts[i].view(outputs[i].sizes()));
    });
  }

  WorkPtr send(Tensors& tensors, int peer, int tag) override {
    auto hosts = host(tensors);
    return work({gloo->send(hosts, peer, tag)}, tensors);
  }

  WorkPtr recv(Tensors& tensors, int peer, int tag) override {
    auto hosts = host(tensors);
    return work({gloo->recv(hosts, peer, tag)}, tensors);
  }

  WorkPtr recvAnysource(Tensors&, int) override {
    STANDIN_CHECK(false, "hccl: recv from any source is not supported, name the source rank");
    return {};
  }

  WorkPtr barrier(const BarrierOptions& given) override {
    auto options = given;
    options.device = std::nullopt;
    options.device_ids.clear();
    return work({gloo->barrier(options)}, {});
  }
};

c10::intrusive_ptr<Backend> make_hccl(c10::intrusive_ptr<Backend> gloo) {
  return c10::make_intrusive<Hccl>(std::move(gloo));
}

}  // namespace standin
