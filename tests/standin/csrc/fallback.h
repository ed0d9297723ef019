// Every operator without a kernel of its own: PyTorch's cpu kernel, run on views of the npu's memory.
#pragma once
#include <torch/library.h>

#include <fstream>
#include <map>
#include <mutex>

#include "call.h"
#include "random.h"

namespace standin {

inline std::mutex books;
inline std::map<std::string, int64_t> op_counts;  // "aten::add.Tensor" -> calls
inline std::string ops_file;                      // each name is appended here when it is first met

inline void count(const c10::FunctionSchema& schema) {
  auto& overload = schema.overload_name();
  std::lock_guard<std::mutex> lock(books);
  auto name = overload.empty() ? schema.name() : schema.name() + "." + overload;
  if (op_counts[name]++ == 0 && !ops_file.empty()) std::ofstream(ops_file, std::ios::app) << name + "\n";
}

// PyTorch lets these take cpu indices (or cpu scalars in a list) beside device tensors.
inline const std::set<std::string> takes_cpu_indices{
    "aten::index",          "aten::index_put",      "aten::index_put_",     "aten::_index_put_impl_",
    "aten::_unsafe_index",  "aten::_foreach_addcdiv_", "aten::_foreach_addcmul_",
    "aten::_foreach_addcdiv", "aten::_foreach_addcmul"};

// They move or fill bytes; strict mode lets them see any dtype.
inline const std::set<std::string> moves_only{
    "aten::_local_scalar_dense", "aten::set_", "aten::resize_", "aten::fill_",
    "aten::zero_", "aten::is_set_to"};

inline bool wants_generator(const c10::Argument& parameter) {
  return parameter.type()->kind() == c10::TypeKind::OptionalType &&
         parameter.type()->expectRef<c10::OptionalType>().getElementType()->kind() ==
             c10::TypeKind::GeneratorType;
}

inline void argument_to_host(Call& call, const c10::Argument& parameter, c10::IValue& v) {
  const bool written = parameter.alias_info() && parameter.alias_info()->isWrite();
  if (v.isTensor()) {
    v = call.in(v.toTensor(), written);
  } else if (v.isTensorList()) {
    c10::List<at::Tensor> list;
    for (auto& t : v.toTensorVector()) list.push_back(call.in(t, written));
    v = list;
  } else if (v.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (std::optional<at::Tensor> t : v.toOptionalTensorList())
      list.push_back(t ? std::optional<at::Tensor>(call.in(*t)) : t);
    v = list;
  } else if (v.isStorage() && v.toStorage().device_type() == kNPU) {
    call.device = v.toStorage().device();
    v = call.host(v.toStorage());
  } else if (v.isDevice() && v.toDevice().type() == kNPU) {
    call.device = checked(v.toDevice());
    v = c10::Device(c10::kCPU);
  } else if (v.isGenerator()) {
    STANDIN_CHECK(v.toGenerator().device().type() == kNPU,
                  "Expected a 'npu' device type for generator but found '", v.toGenerator().device().type(), "'");
    v = next_of(v.toGenerator());
  }
}

inline void result_to_npu(Call& call, c10::IValue& v, bool computes) {
  if (v.isTensor()) {
    if (computes && v.toTensor().defined()) check_dtype(call.name, v.toTensor().scalar_type());
    v = call.out(v.toTensor());
  } else if (v.isTensorList()) {
    c10::List<at::Tensor> list;
    for (auto& t : v.toTensorVector()) list.push_back(call.out(t));
    v = list;
  }
}

inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& parameters = schema.arguments();
  count(schema);
  Call call(schema.name().c_str());
  bool is_view = false;
  for (auto& r : schema.returns()) is_view |= r.alias_info() && !r.alias_info()->isWrite();
  const bool computes = !is_view && !moves_only.count(schema.name());

  auto arguments = stack->end() - parameters.size();
  const bool self_on_cpu = arguments->isTensor() && arguments->toTensor().defined() &&
                           arguments->toTensor().device().type() != kNPU;
  for (size_t i = 0; i < parameters.size(); i++) argument_to_host(call, parameters[i], arguments[i]);
  if (!call.device) call.device = c10::Device(kNPU, current);
  if (self_on_cpu || !takes_cpu_indices.count(schema.name())) call.refuse_stray();
  if (computes)
    for (auto& [npu, host] : call.tensors) check_dtype(call.name, npu.scalar_type());
  for (size_t i = 0; i < parameters.size(); i++)
    if (arguments[i].isNone() && wants_generator(parameters[i]))
      arguments[i] = next_of(default_generator(call.device->index()));

  op.callBoxed(stack);

  call.sync();
  for (auto result = stack->end() - schema.returns().size(); result != stack->end(); ++result)
    result_to_npu(call, *result, computes);
}

}  // namespace standin
