// Requests that the system allow this process the instructions of the level.

#include "common.h"

#if defined(__AMX_TILE__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

// 0, or another number when the system refuses the level's instructions. Called once, before any other function.
EXPORT int roseinfer_init() {
#if defined(__AMX_TILE__) && defined(__linux__)
    // The tiles' 8 KiB of state must be requested: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
    return syscall(SYS_arch_prctl, 0x1023, 18) != 0;
#else
    return 0;
#endif
}
