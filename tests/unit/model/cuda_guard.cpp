// Lets a torch that was built for CPUs have tensors on `cuda`, as long as nothing is computed with them.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
}
