// Registers a CUDA device that does nothing, so that autograd and fake tensors accept "cuda" on a torch built for CPUs.
// The library must be loaded before torch: torch looks for its hooks once.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr auto kCuda = c10::DeviceType::CUDA;

struct NoGuard final : c10::impl::NoOpDeviceGuardImpl<kCuda> {
  c10::Device getDevice() const override { return c10::Device(kCuda, 0); }
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kCuda, 0));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
};
C10_REGISTER_GUARD_IMPL(CUDA, NoGuard);

}  // namespace

namespace at {

struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};
REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace at
