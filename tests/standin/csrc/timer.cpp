// When DistributedDataParallel's steps begin and end; a device without a timer gets a warning a rank.
// The stand-in computes at once, so the host's clock is the device's.
#include <c10/core/DeviceType.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

namespace {

class HostTimer : public c10d::Timer {
 public:
  explicit HostTimer(c10::Device) {}

  std::optional<int64_t> measureDifference(Event start, Event end) override {
    auto from = getTimestamp(start), to = getTimestamp(end);
    return from && to ? std::optional<int64_t>(*to - *from) : std::nullopt;
  }
};

}  // namespace

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::DeviceType::PrivateUse1, HostTimer)
}  // namespace c10d
