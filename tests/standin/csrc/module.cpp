// What Python sees.
#include <pybind11/functional.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/python.h>

#include "fallback.h"
#include "hccl.h"
#include "hooks.h"

using namespace standin;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("set_device_count", [](int n) { device_count = std::min(n, kMaxDevices); });
  m.def("device_count", [] { return device_count; });
  m.def("current_device", [] { return int(current); });
  m.def("set_device", [](int d) { Guard().setDevice({kNPU, c10::DeviceIndex(d)}); });
  m.def("default_generator", [](int d) { return default_generator(d); });
  m.def("refuse_dtypes", [](const std::vector<py::object>& dtypes) {
    refused_dtypes.clear();
    for (auto& d : dtypes) refused_dtypes.insert(torch::python::detail::py_object_to_dtype(d));
  });
  m.def("set_where", [](std::function<std::string()> from_python) {
    auto* keep = new std::function<std::string()>(std::move(from_python));  // outlives the interpreter
    where = [keep] {
      py::gil_scoped_acquire gil;
      return (*keep)();
    };
  });
  m.def("set_ops_file", [](std::string path) { ops_file = std::move(path); });
  m.def("op_counts", [] {
    std::lock_guard<std::mutex> lock(books);
    return op_counts;
  });
  m.def("reset_op_counts", [] {
    std::lock_guard<std::mutex> lock(books);
    op_counts.clear();
  });
  m.def("make_hccl", &make_hccl, py::call_guard<py::gil_scoped_release>());
}
