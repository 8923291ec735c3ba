/* Entering a call: the lock, the log, injected faults, and what the call needs.
 *
 * DS4_SIM_FAULT: comma-separated [PROGRAM/]FUNCTION:N[+]:ACTION. PROGRAM is a part of the command
 * line of the processes that are meant; FUNCTION is a name without its version (cuMemCreate) or
 * "any"; N counts its calls in this process from 1, with a plus this one and all later ones.
 * ACTION: "kill" (SIGKILL before the call does anything), "sticky" (the context is lost, code 719)
 * or a number, the result of the call.
 */
#include "stand_in.h"

#include <fcntl.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>

bool sim::initialised = false;
std::recursive_mutex sim::big_lock;

namespace {

CUresult sticky = CUDA_SUCCESS;

struct Fault {
    std::string function, action;
    long from;
    bool and_later;
};

std::string command_line() {
    std::ifstream file("/proc/self/cmdline", std::ios::binary);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
}

[[noreturn]] void misspelt(const std::string &text) {
    fprintf(stderr, "stand-in driver: DS4_SIM_FAULT: cannot read \"%s\"\n", text.c_str());
    _exit(99); /* a test that injects nothing must not pass */
}

std::vector<Fault> read_faults() {
    std::vector<Fault> faults;
    const char *all = getenv("DS4_SIM_FAULT");
    std::stringstream parts(all ? all : "");
    std::string part;
    while (std::getline(parts, part, ',')) {
        size_t action = part.rfind(':');
        size_t count = action ? part.rfind(':', action - 1) : std::string::npos;
        if (action == std::string::npos || count == std::string::npos) misspelt(part);
        std::string function = part.substr(0, count);
        std::string number = part.substr(count + 1, action - count - 1);
        Fault fault{function, part.substr(action + 1), atol(number.c_str()), false};
        if (fault.from < 1 || fault.action.empty()) misspelt(part);
        fault.and_later = number.back() == '+';
        size_t slash = function.rfind('/');
        if (slash != std::string::npos) {
            fault.function = function.substr(slash + 1);
            if (command_line().find(function.substr(0, slash)) == std::string::npos) continue;
        }
        faults.push_back(fault);
    }
    return faults;
}

/* cuMemAlloc_v2 is cuMemAlloc to its callers, cuGraphInstantiateWithFlags cuGraphInstantiate. */
std::string plain_name(const char *function) {
    std::string name = function;
    size_t version = name.rfind("_v");
    if (version != std::string::npos) name.resize(version);
    if (name == "cuGraphInstantiateWithFlags") name = "cuGraphInstantiate";
    return name;
}

void log_call(const std::string &name) {
    static const int fd = [] {
        const char *path = getenv("DS4_SIM_LOG");
        return path ? open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600) : -1;
    }();
    if (fd < 0) return;
    std::string line = std::to_string(getpid()) + " " + name + "\n";
    if (write(fd, line.data(), line.size()) < 0) perror("stand-in driver: DS4_SIM_LOG");
}

CUresult injected(const std::string &name) {
    static const std::vector<Fault> faults = read_faults();
    static std::map<std::string, long> calls;
    if (faults.empty()) return CUDA_SUCCESS;
    long of_this = ++calls[name], of_any = ++calls["any"];
    for (const Fault &fault : faults) {
        if (fault.function != name && fault.function != "any") continue;
        long count = fault.function == "any" ? of_any : of_this;
        if (fault.and_later ? count < fault.from : count != fault.from) continue;
        if (fault.action == "kill") kill(getpid(), SIGKILL);
        if (fault.action == "sticky") return sim::poison(CUDA_ERROR_LAUNCH_FAILED);
        int code = atoi(fault.action.c_str());
        if (!code) misspelt(fault.action);
        return CUresult(code);
    }
    return CUDA_SUCCESS;
}

} // namespace

CUresult sim::poison(CUresult code) {
    if (sticky == CUDA_SUCCESS) sticky = code;
    return sticky;
}

CUresult sim::poisoned() { return sticky; }

sim::Call::Call(const char *function, Needs needs) : lock(big_lock) {
    std::string name = plain_name(function);
    log_call(name);
    refused = injected(name);
    if (refused != CUDA_SUCCESS || needs == Needs::nothing) return;
    if (!initialised)
        refused = CUDA_ERROR_NOT_INITIALIZED;
    else if (needs == Needs::context)
        refused = sticky != CUDA_SUCCESS ? sticky
                  : context_is_current() ? CUDA_SUCCESS
                                         : CUDA_ERROR_INVALID_CONTEXT;
}
