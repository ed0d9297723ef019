// Random numbers: a generator per device, independent of the cpu's, so mixed-up seeds show.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Utils.h>
#include <ATen/core/Generator.h>
#include <ATen/ops/empty.h>

#include "device.h"

namespace standin {

// Like an NPU's Philox generator its whole state is a seed and an offset; DTensor relies on that.
struct Generator final : c10::GeneratorImpl {
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
  at::Generator host = at::detail::createCPUGenerator();

  explicit Generator(c10::DeviceIndex i)
      : c10::GeneratorImpl({kNPU, i}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  // The cpu generator for one operator's worth of numbers (splitmix64 of seed and offset).
  at::Generator next() {
    uint64_t x = seed_ + 0x9E3779B97F4A7C15ull * (offset_ + 1);
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    host.set_current_seed(x ^ (x >> 31));
    offset_ += 4;
    return host;
  }

  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  uint64_t current_seed() const override { return seed_; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    STANDIN_CHECK(state.numel() == 16 && state.dtype() == caffe2::TypeMeta::Make<uint8_t>(),
                  "the state of an npu generator is 16 bytes");
    auto* bytes = static_cast<const char*>(state.data());
    std::memcpy(&seed_, bytes, 8);
    std::memcpy(&offset_, bytes + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    auto* bytes = static_cast<char*>(state.data_ptr());
    std::memcpy(bytes, &seed_, 8);
    std::memcpy(bytes + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->seed_ = seed_, copy->offset_ = offset_;
    return copy;
  }
};

inline const at::Generator& default_generator(c10::DeviceIndex i) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int k = 0; k < kMaxDevices; k++) made.push_back(at::make_generator<Generator>(k));
    return made;
  }();
  return all.at(i < 0 ? current : i);
}

inline at::Generator next_of(const at::Generator& generator) {
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->next();
}

}  // namespace standin
