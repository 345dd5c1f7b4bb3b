// Repeats calls of kernels that were recorded: a step of few rows is some hundred of them, of a few microseconds each, and
// Python would take as long between two of them, since each reads megabytes of weights through the caches.

#include "common.h"
#include "team.h"

namespace {

// So many words are passed in registers on x86-64 and on Arm. A kernel that has fewer, or narrower ones, reads those that
// it has; one that has more, or numbers of floating point, is not recorded.
using Kernel = void (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);

// A call: _Call of model/steps/replay.py.
struct RecordedCall {
    Kernel kernel;
    int64_t arguments[6];
};

}  // namespace

EXPORT void roseinfer_replay(const RecordedCall* calls, int64_t num_calls) {
    Team::open(num_calls, [&](int64_t i) {
        const int64_t* words = calls[i].arguments;
        calls[i].kernel(words[0], words[1], words[2], words[3], words[4], words[5]);
    });
}
