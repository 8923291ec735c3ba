/* The device's memory: one memfd per allocation, and how much of it is in use.
 *
 * Without DS4_SIM_POOL a process counts what it made itself. With it, memory is counted over all
 * processes by looking for the pool's memfds in /proc: it is in use while any of them holds a
 * descriptor or a mapping, however the others ended.
 */
#include "stand_in.h"

#include <dirent.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <climits>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>

namespace {

/* No name of ours: nobody may take a device's memory for host memory. */
std::string memory_name() { return "sim-device." + sim::profile().pool; }

std::string link_target(const std::string &path) {
    char target[PATH_MAX];
    ssize_t n = readlink(path.c_str(), target, sizeof target);
    return n < 0 ? "" : std::string(target, n);
}

void count_descriptors(const std::string &process, std::map<ino_t, uint64_t> &found) {
    DIR *folder = opendir((process + "/fd").c_str());
    if (!folder) return; /* another user's, or gone */
    while (dirent *entry = readdir(folder)) {
        std::string path = process + "/fd/" + entry->d_name;
        struct stat info;
        if (link_target(path) == "/memfd:" + memory_name() + " (deleted)" &&
            !stat(path.c_str(), &info))
            found[info.st_ino] = info.st_size;
    }
    closedir(folder);
}

void count_mappings(const std::string &process, std::map<ino_t, uint64_t> &found) {
    std::ifstream maps(process + "/maps");
    std::string line;
    while (std::getline(maps, line)) {
        if (line.find("/memfd:" + memory_name() + " ") == std::string::npos) continue;
        unsigned long from, to, inode;
        if (sscanf(line.c_str(), "%lx-%lx %*s %*s %*s %lu", &from, &to, &inode) == 3)
            found.emplace(inode, to - from);
    }
}

} // namespace

uint64_t sim::own_bytes = 0;

uint64_t sim::used_bytes() {
    if (profile().pool.empty()) return own_bytes;
    std::map<ino_t, uint64_t> found;
    DIR *processes = opendir("/proc");
    while (dirent *entry = readdir(processes)) {
        if (entry->d_name[0] < '0' || entry->d_name[0] > '9') continue;
        std::string process = std::string("/proc/") + entry->d_name;
        count_descriptors(process, found);
        count_mappings(process, found);
    }
    closedir(processes);
    uint64_t sum = 0;
    for (auto &[inode, n_bytes] : found) sum += n_bytes;
    return sum;
}

int sim::new_memory(uint64_t n_bytes) {
    int fd = memfd_create(memory_name().c_str(), MFD_CLOEXEC);
    if (fd >= 0 && ftruncate(fd, n_bytes)) {
        close(fd);
        return -1;
    }
    return fd;
}

bool sim::is_device_memory(int fd) {
    std::string target = link_target("/proc/self/fd/" + std::to_string(fd));
    return target == "/memfd:" + memory_name() + " (deleted)";
}
