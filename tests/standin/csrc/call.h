// One operator call: npu arguments become cpu views of the same bytes, and the results come back.
#pragma once
#include <ATen/ATen.h>

#include <set>

#include "memory.h"

namespace standin {

inline std::set<c10::ScalarType> refused_dtypes;  // strict mode: what the real device computes badly or not

inline void check_dtype(const char* name, c10::ScalarType dtype) {
  STANDIN_CHECK(!refused_dtypes.count(dtype), name, ": ", dtype,
                " is not supported on the npu (the stand-in is strict: float64 and complex stay on the cpu)");
}

inline at::Tensor on_storage(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  auto t = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  t.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  t._set_conj(like.is_conj());
  t._set_neg(like.is_neg());
  return t;
}

struct Call {
  const char* name;
  std::optional<c10::Device> device;
  at::Tensor stray;  // an argument that is on the cpu, if there is one
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors;       // npu, its cpu view
  std::vector<std::pair<c10::Storage, c10::Storage>> storages;  // npu, its cpu view

  explicit Call(const char* name) : name(name) {}

  const c10::Storage& host(const c10::Storage& npu) {
    for (auto& [n, h] : storages)
      if (n.unsafeGetStorageImpl() == npu.unsafeGetStorageImpl()) return h;
    storages.emplace_back(npu, host_view(npu));
    return storages.back().second;
  }

  c10::Storage back(const c10::Storage& cpu) {
    for (auto& [n, h] : storages)
      if (h.unsafeGetStorageImpl() == cpu.unsafeGetStorageImpl()) return n;
    c10::Storage npu(c10::Storage::use_byte_size_t(), cpu.nbytes(), adopt(cpu, *device), &allocator, true);
    storages.emplace_back(npu, cpu);
    return npu;
  }

  void mixed(c10::Device other) const {
    STANDIN_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ",
                  *device, " and ", other, "! (", name, ")");
  }

  at::Tensor in(const at::Tensor& t, bool written = false) {
    if (!t.defined()) return t;
    if (t.device().type() != kNPU) {
      if (t.dim() > 0 || written) stray = t;  // a 0-dim cpu tensor counts as a number
      return t;
    }
    if (device && *device != t.device()) mixed(t.device());
    device = t.device();
    auto view = on_storage(host(t.storage()), c10::DispatchKey::CPU, t);
    if (t.unsafeGetTensorImpl()->is_wrapped_number())
      view.unsafeGetTensorImpl()->set_wrapped_number(true);
    tensors.emplace_back(t, view);
    return view;
  }

  at::Tensor out(const at::Tensor& t) {
    if (!t.defined() || t.device().type() == kNPU) return t;
    for (auto& [n, h] : tensors)
      if (h.is_same(t)) return n;
    return on_storage(back(t.storage()), c10::DispatchKey::PrivateUse1, t);
  }

  void refuse_stray() const {
    if (stray.defined() && device) mixed(stray.device());
  }

  // resize_, set_ and out= change memory and shapes of the cpu views: carry both over.
  void sync() {
    for (auto& [n, h] : storages)
      if (n.data() != h.data()) {
        n.unsafeGetStorageImpl()->set_data_ptr_noswap(adopt(h, n.device()));
        n.unsafeGetStorageImpl()->set_nbytes(h.nbytes());
      }
    for (auto& [n, h] : tensors) {
      auto* impl = n.unsafeGetTensorImpl();
      auto storage = back(h.storage());
      if (storage.unsafeGetStorageImpl() != n.storage().unsafeGetStorageImpl())
        impl->set_storage_keep_dtype(storage);
      if (n.sizes() != h.sizes() || n.strides() != h.strides() || n.storage_offset() != h.storage_offset())
        impl->set_sizes_and_strides(h.sizes(), h.strides(), h.storage_offset());
    }
  }
};

}  // namespace standin
