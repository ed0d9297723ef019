// Which devices exist and which one is current. Streams and events keep books only: all is synchronous.
#pragma once
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <functional>
#include <string>

namespace standin {

constexpr auto kNPU = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 16;

inline int device_count = 1;  // set once by the Python module, before the first tensor
inline thread_local c10::DeviceIndex current = 0;

// " [file:line: source]" of the Python line that is running, for error messages. Set by Python.
inline std::function<std::string()> where = [] { return std::string(); };

// A refusal is a plain RuntimeError: NotImplementedError means "exercise not written" in the book.
#define STANDIN_CHECK(cond, ...) TORCH_CHECK(cond, __VA_ARGS__, ::standin::where())

inline c10::Device checked(c10::Device device) {
  auto index = device.has_index() ? device.index() : current;
  STANDIN_CHECK(index >= 0 && index < device_count, "npu:", int(index), " does not exist: there are ",
                device_count, " npu devices");
  return {kNPU, index};
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static inline thread_local c10::StreamId streams[kMaxDevices] = {};  // the current one of each device

  c10::DeviceType type() const override { return kNPU; }
  c10::Device getDevice() const override { return {kNPU, current}; }
  void setDevice(c10::Device d) const override { current = checked(d).index(); }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.has_index()) current = d.index();
  }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto old = getDevice();
    setDevice(d);
    return old;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  static c10::Stream stream(c10::Device d, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, checked(d), id);
  }
  c10::Stream getStream(c10::Device d) const override {
    return stream(d, streams[checked(d).index()]);
  }
  c10::Stream getDefaultStream(c10::Device d) const override { return stream(d, 0); }
  c10::Stream getNewStream(c10::Device d, int) const override {
    static std::atomic<c10::StreamId> next{1};
    return stream(d, next++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override {
    return getNewStream(d, 0);
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto old = getStream(s.device());
    streams[s.device_index()] = s.id();
    return old;
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}

  // An event is the host time, in milliseconds, at which it was recorded.
  static double& time_of(void* event) { return *static_cast<double*>(event); }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    using namespace std::chrono;
    if (!*event) *event = new double;
    time_of(*event) = duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<double*>(event);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override {
    return time_of(b) - time_of(a);
  }
};

}  // namespace standin
