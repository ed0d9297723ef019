// The operators that have no cpu kernel under their name, or must not run as they would on a cpu.
#pragma once
#include <ATen/EmptyTensor.h>

#include "fallback.h"

namespace standin {

using OptionalTensor = std::optional<at::Tensor>;
const c10::DispatchKeySet npu_keys(c10::DispatchKey::PrivateUse1);

inline at::Tensor empty_memory_format(c10::IntArrayRef size, std::optional<at::ScalarType> dtype,
                                      std::optional<at::Layout>, std::optional<at::Device> device,
                                      std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(checked(device.value_or(c10::Device(kNPU))));
  check_dtype("creating a tensor", c10::dtype_or_default(dtype));
  return at::detail::empty_generic(size, &allocator, npu_keys, c10::dtype_or_default(dtype), format);
}

inline at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                                std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                                std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(checked(device.value_or(c10::Device(kNPU))));
  check_dtype("creating a tensor", c10::dtype_or_default(dtype));
  return at::detail::empty_strided_generic(size, stride, &allocator, npu_keys, c10::dtype_or_default(dtype));
}

// Copies are what may cross devices: two Calls, one a side.
inline at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  Call to("copy_"), from("copy_");
  to.in(target).copy_(from.in(source));
  return target;
}

inline at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

inline at::Tensor convolution(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
                              c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
                              c10::SymIntArrayRef dilation, bool transposed,
                              c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  Call call("convolution");
  auto hx = call.in(x), hw = call.in(weight);
  auto hb = bias ? OptionalTensor(call.in(*bias)) : bias;
  call.refuse_stray();
  check_dtype(call.name, x.scalar_type());
  return call.out(at::convolution_symint(hx, hw, hb, stride, padding, dilation, transposed, output_padding, groups));
}

inline std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
    c10::SymIntArrayRef output_padding, c10::SymInt groups, std::array<bool, 3> mask) {
  Call call("convolution_backward");
  auto hg = call.in(grad), hx = call.in(x), hw = call.in(weight);
  call.refuse_stray();
  std::vector<c10::SymInt> bias{transposed ? weight.sym_size(1) * groups : weight.sym_size(0)};
  auto [gx, gw, gb] = at::convolution_backward_symint(
      hg, hx, hw, at::OptionalSymIntArrayRef(bias), stride, padding, dilation, transposed, output_padding, groups, mask);
  return {call.out(gx), call.out(gw), call.out(gb)};
}

// The cpu's would draw from the cpu's generator.
inline std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& x, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) return {x.clone(), at::ones_like(x, x.options().dtype(at::kBool))};
  auto mask = at::empty(x.sizes(), x.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {p == 1 ? at::zeros_like(x) : x.mul(mask).mul_(1 / (1 - p)), mask};
}

// PyTorch sends LSTM and GRU cells of every device but the cpu to a fused kernel; here, plain operators.
inline at::Tensor plus(const at::Tensor& a, const OptionalTensor& b) { return b && b->defined() ? a + *b : a; }

inline std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& from_input, const at::Tensor& from_hidden, const at::Tensor& cell,
    const OptionalTensor& input_bias, const OptionalTensor& hidden_bias) {
  auto gates = (plus(from_input, input_bias) + plus(from_hidden, hidden_bias)).chunk(4, 1);
  auto next = gates[1].sigmoid() * cell + gates[0].sigmoid() * gates[2].tanh();
  return {gates[3].sigmoid() * next.tanh(), next, at::empty({0}, cell.options())};
}

inline std::tuple<at::Tensor, at::Tensor> gru_cell(
    const at::Tensor& from_input, const at::Tensor& from_hidden, const at::Tensor& hidden,
    const OptionalTensor& input_bias, const OptionalTensor& hidden_bias) {
  auto i = plus(from_input, input_bias).chunk(3, 1), h = plus(from_hidden, hidden_bias).chunk(3, 1);
  auto reset = (i[0] + h[0]).sigmoid(), update = (i[1] + h[1]).sigmoid(), fresh = (i[2] + reset * h[2]).tanh();
  return {fresh + update * (hidden - fresh), at::empty({0}, hidden.options())};
}

// Module.to(device) keeps Parameter objects, and so tied weights, only between device types that say
// they are compatible. PyTorch's own rule leaves PrivateUse1 out; torch_npu replaces it too.
inline bool compatible(const at::Tensor& a, const at::Tensor& b) {
  auto dense = [](const at::Tensor& t) {
    return t.layout() == at::kStrided && (t.is_cpu() || t.device().type() == kNPU);
  };
  return a.unsafeGetTensorImpl()->key_set() == b.unsafeGetTensorImpl()->key_set() || (dense(a) && dense(b));
}

inline void record_stream(at::Tensor&, c10::Stream) {}

}  // namespace standin
