/* What the workers of one listening socket share: locks that survive their holder, and the journals
 * of parked client connections.
 *
 * Owns: the layout of a seat's memory, its robust locks, and the passing of descriptors through a
 * lane. Who may hold what, and what a journal means, is ds4_common/seat.py's business and
 * ds4_worker/http/parking.py's. Refuses nothing by itself: all descriptors and indexes come from
 * those two.
 *
 * A lock is a robust process-shared pthread mutex. The kernel releases it when the thread that holds
 * it dies, before the address space of its process is torn down: the next in line knows of the death
 * in milliseconds, however many gigabytes were mapped. So the thread that locks must live as long as
 * its process: workers use their main thread.
 *
 * A lane is a pair of SOCK_SEQPACKET sockets. What is sent into it stays in the kernel's queue, and
 * with it the descriptor that it carries: a client connection with a copy in a queue stays open
 * whoever dies.
 */
#ifndef DS4_SEAT_H
#define DS4_SEAT_H

#include <pthread.h>
#include <stdint.h>

#include "matmul.h" /* DS4_EXPORT */

#define DS4_SEAT_VERSION 1
#define DS4_SEAT_LANES 4
#define DS4_SEAT_SLOTS 1024          /* connections per lane */
#define DS4_SEAT_JOURNAL (16 << 10)  /* bytes of each journal that lie together */
#define DS4_SEAT_SPILL (66ull << 20) /* and what a longer one may use besides: a sparse region */

enum { DS4_SEAT_SERVING, DS4_SEAT_CLAIM, DS4_SEAT_STANDBY, DS4_SEAT_LANE }; /* lock numbers; lanes follow each other */

/* One parked connection. Written by the holder of its lane only; fields change one at a time, so
 * that a holder that dies between two of them leaves something its successor can judge. */
typedef struct {
    uint64_t connection;     /* its number in this lane; 0: free */
    uint64_t received;       /* bytes from the client since it connected, all of them journaled... */
    uint64_t base;           /* ...and those before the first byte in the journal */
    uint64_t queued;         /* bytes for the client since it connected */
    uint64_t begin;          /* `queued` when the newest response began */
    uint64_t progress;       /* 2 x responses since the journal began, + 1 while one is under way */
    uint32_t begin_answered; /* responses complete when the newest one began */
    uint32_t lives;          /* workers that died over what is in the journal */
    uint64_t sent;           /* of a Unix connection: bytes that its kernel took, or DS4_SLOT_UNSURE */
} ds4_slot;

/* More was on its way when this was written: how much of it went nobody knows until the writer says. */
#define DS4_SLOT_UNSURE (1ull << 63)

typedef struct {
    uint64_t magic;
    uint64_t version;
    uint64_t next_connection[DS4_SEAT_LANES];
    int64_t holder_pid;
    pthread_mutex_t locks[DS4_SEAT_LANE + DS4_SEAT_LANES];
} ds4_seat;

/* Sizes and places, in bytes: seat memory, mapped part of it, slots, size of a slot, journals, size of
 * a journal, spills, size of a spill; then counts of lanes and slots. */
DS4_EXPORT void ds4_seat_layout(uint64_t layout[10]);
/* Fills zeroed memory. 0, or -errno. One caller at a time. */
DS4_EXPORT int ds4_seat_init(ds4_seat *seat);
/* Whether memory was filled by a build with the same layout. */
DS4_EXPORT int ds4_seat_fits(const ds4_seat *seat);
/* 0: locked; 1: locked, and the last holder died with it; -ETIMEDOUT, -EBUSY (timeout 0), -errno.
 * Negative timeouts wait for ever. */
DS4_EXPORT int ds4_seat_lock(ds4_seat *seat, int lock, int timeout_ms);
DS4_EXPORT int ds4_seat_unlock(ds4_seat *seat, int lock);

/* Accepts a connection and parks a copy at once. The descriptor + 2^32 when the lane is full and there
 * is no copy; -errno. */
DS4_EXPORT int64_t ds4_lane_accept(int listener, int park, uint32_t slot, uint64_t connection);
/* Parks a copy of `fd` (none when negative: a mark). 0 or -errno. */
DS4_EXPORT int ds4_lane_park(int park, int fd, uint32_t slot, uint64_t connection);
/* The oldest entry, which stays: its descriptor (close-on-exec), -1 for a mark, or -errno - 1. */
DS4_EXPORT int ds4_lane_peek(int take, uint32_t *slot, uint64_t *connection);
/* Sends bytes on a Unix connection, where the kernel does not count them, and counts them in its slot,
 * which is unsure meanwhile. How many went, or -errno. */
DS4_EXPORT int64_t ds4_slot_send(ds4_slot *slot, int fd, const void *data, uint64_t n_bytes);
/* Drops the oldest entry and its copy; its number, or 0 when there is none. */
DS4_EXPORT uint64_t ds4_lane_drop(int take);

#endif
