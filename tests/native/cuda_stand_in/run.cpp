/* Runs work with memory faults caught: a bad address ends the context, not the process. */
#include "stand_in.h"

#include <csetjmp>
#include <csignal>

namespace {

thread_local sigjmp_buf *landing = nullptr;
struct sigaction earlier[2];

void on_fault(int signal, siginfo_t *info, void *machine) {
    if (landing) siglongjmp(*landing, 1);
    const struct sigaction &before = earlier[signal == SIGBUS];
    if (before.sa_flags & SA_SIGINFO) return before.sa_sigaction(signal, info, machine);
    if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN)
        return before.sa_handler(signal);
    sigaction(signal, &before, nullptr); /* returning runs into the fault again */
}

/* No object with a destructor may live in this frame: a fault jumps back into it. */
__attribute__((noinline)) CUresult guarded(const std::function<CUresult()> &work) {
    sigjmp_buf here;
    if (sigsetjmp(here, 1)) {
        landing = nullptr;
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    landing = &here;
    CUresult code = work();
    landing = nullptr;
    return code;
}

} // namespace

void sim::catch_faults() {
    static bool done = false;
    if (done) return;
    done = true;
    struct sigaction ours = {};
    ours.sa_sigaction = on_fault;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &ours, &earlier[0]);
    sigaction(SIGBUS, &ours, &earlier[1]);
}

CUresult sim::protect(const std::function<CUresult()> &work) {
    if (poisoned() != CUDA_SUCCESS) return poisoned();
    reveal_memory();
    CUresult code = guarded(work);
    hide_memory();
    return code == CUDA_SUCCESS ? code : poison(code);
}
