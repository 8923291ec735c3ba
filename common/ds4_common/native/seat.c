/* Seats: see seat.h. */
#define _GNU_SOURCE /* accept4 */
#include "seat.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MAGIC 0x7461657334736400ull
#define ALIGN 4096ull
#define NO_COPY (1ll << 32)

/* --- memory ------------------------------------------------------------------------------------ */

static uint64_t aligned(uint64_t n) { return (n + ALIGN - 1) & ~(ALIGN - 1); }

void ds4_seat_layout(uint64_t layout[10]) {
    const uint64_t count = DS4_SEAT_LANES * DS4_SEAT_SLOTS;
    const uint64_t slots = aligned(sizeof(ds4_seat));
    const uint64_t journals = slots + aligned(count * sizeof(ds4_slot));
    const uint64_t spills = journals + count * DS4_SEAT_JOURNAL;
    const uint64_t values[10] = {
        spills + count * DS4_SEAT_SPILL, spills, slots, sizeof(ds4_slot), journals, DS4_SEAT_JOURNAL,
        spills, DS4_SEAT_SPILL, DS4_SEAT_LANES, DS4_SEAT_SLOTS,
    };
    memcpy(layout, values, sizeof values);
}

int ds4_seat_init(ds4_seat *seat) {
    pthread_mutexattr_t attributes;
    int error = pthread_mutexattr_init(&attributes);
    if (error) return -error;
    error = pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    if (!error) error = pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    for (int i = 0; !error && i < DS4_SEAT_LANE + DS4_SEAT_LANES; i++)
        error = pthread_mutex_init(&seat->locks[i], &attributes);
    pthread_mutexattr_destroy(&attributes);
    if (error) return -error;
    seat->version = DS4_SEAT_VERSION;
    seat->magic = MAGIC + sizeof(pthread_mutex_t);
    return 0;
}

int ds4_seat_fits(const ds4_seat *seat) {
    return seat->magic == MAGIC + sizeof(pthread_mutex_t) && seat->version == DS4_SEAT_VERSION;
}

/* --- locks ------------------------------------------------------------------------------------- */

int ds4_seat_lock(ds4_seat *seat, int lock, int timeout_ms) {
    pthread_mutex_t *mutex = &seat->locks[lock];
    int error;
    if (timeout_ms == 0) {
        error = pthread_mutex_trylock(mutex);
    } else if (timeout_ms < 0) {
        error = pthread_mutex_lock(mutex);
    } else {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec += timeout_ms / 1000;
        until.tv_nsec += timeout_ms % 1000 * 1000000l;
        if (until.tv_nsec >= 1000000000l) {
            until.tv_sec++;
            until.tv_nsec -= 1000000000l;
        }
        error = pthread_mutex_timedlock(mutex, &until);
    }
    if (error == EOWNERDEAD) {
        error = pthread_mutex_consistent(mutex);
        return error ? -error : 1;
    }
    return -error;
}

int ds4_seat_unlock(ds4_seat *seat, int lock) { return -pthread_mutex_unlock(&seat->locks[lock]); }

/* --- lanes ------------------------------------------------------------------------------------- */

typedef struct {
    uint64_t connection;
    uint32_t slot;
    uint32_t padding;
} entry;

typedef union {
    char bytes[CMSG_SPACE(sizeof(int))];
    struct cmsghdr align;
} ancillary;

int ds4_lane_park(int park, int fd, uint32_t slot, uint64_t connection) {
    entry data = {connection, slot, 0};
    struct iovec part = {&data, sizeof data};
    ancillary control;
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd >= 0) {
        memset(&control, 0, sizeof control);
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof control.bytes;
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof fd);
        memcpy(CMSG_DATA(header), &fd, sizeof fd);
    }
    ssize_t sent;
    do sent = sendmsg(park, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (sent < 0 && errno == EINTR);
    return sent < 0 ? -errno : 0;
}

int64_t ds4_lane_accept(int listener, int park, uint32_t slot, uint64_t connection) {
    int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) return -errno;
    return ds4_lane_park(park, fd, slot, connection) ? fd + NO_COPY : fd;
}

/* Receives an entry; its descriptor or -1. False, with errno set, when there is none. */
static int receive(int take, int flags, entry *data, int *fd) {
    struct iovec part = {data, sizeof *data};
    ancillary control;
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes,
        .msg_controllen = sizeof control.bytes,
    };
    ssize_t got;
    do got = recvmsg(take, &message, flags | MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    while (got < 0 && errno == EINTR);
    if (got < 0) return 0;
    if (got == 0) {
        errno = EPIPE;
        return 0;
    }
    *fd = -1;
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (header && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS)
        memcpy(fd, CMSG_DATA(header), sizeof *fd);
    if (*fd < 0 && message.msg_flags & MSG_CTRUNC && flags & MSG_PEEK) {
        errno = EMFILE; /* no room in our table: not a mark, and not lost */
        return 0;
    }
    return 1;
}

int ds4_lane_peek(int take, uint32_t *slot, uint64_t *connection) {
    entry data = {0};
    int fd;
    if (!receive(take, MSG_PEEK, &data, &fd)) return -errno - 1;
    *slot = data.slot;
    *connection = data.connection;
    return fd;
}

int64_t ds4_slot_send(ds4_slot *slot, int fd, const void *data, uint64_t n_bytes) {
    const uint64_t before = slot->sent;
    __atomic_store_n(&slot->sent, before | DS4_SLOT_UNSURE, __ATOMIC_SEQ_CST);
    ssize_t sent;
    do sent = send(fd, data, n_bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (sent < 0 && errno == EINTR);
    const int error = errno;
    __atomic_store_n(&slot->sent, before + (sent > 0 ? (uint64_t)sent : 0), __ATOMIC_SEQ_CST);
    return sent < 0 ? -error : sent;
}

uint64_t ds4_lane_drop(int take) {
    entry data = {0};
    int fd;
    if (!receive(take, 0, &data, &fd)) return 0;
    if (fd >= 0) close(fd);
    return data.connection;
}
