/* The machine's own ceiling: how fast this many threads can read plain memory.
 *
 * Owns: one measurement used by the benchmarks, so that every figure can be given as a share of what
 * the machine can do in the same run. Not used while serving.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#include "matmul.h"

typedef uint64_t vector __attribute__((vector_size(32), aligned(32)));
enum { LANES = 8, AHEAD_BYTES = 4096 }; /* 256 bytes per turn; prefetch far enough for DRAM */

typedef struct {
    const vector *vectors;
    size_t n_vectors;
    pthread_barrier_t *barrier;
    double seconds;
    uint64_t sum; /* kept so that the reads cannot be removed */
} reader;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void *read_all(void *argument) {
    reader *r = argument;
    vector sums[LANES] = {0};
    pthread_barrier_wait(r->barrier);
    double start = now();
    for (size_t i = 0; i + LANES <= r->n_vectors; i += LANES) {
        const char *ahead = (const char *)(r->vectors + i) + AHEAD_BYTES;
        for (int j = 0; j < LANES / 2; j++) __builtin_prefetch(ahead + 64 * j);
        for (int j = 0; j < LANES; j++) sums[j] += r->vectors[i + (size_t)j];
    }
    r->seconds = now() - start;
    for (int j = 0; j < LANES; j++) r->sum += sums[j][0] + sums[j][1] + sums[j][2] + sums[j][3];
    return NULL;
}

/* Best of `rounds` passes in bytes per second, each thread reading its own share of `bytes`
 * anonymous memory (2 MiB pages where allowed). Returns 0 when memory or threads cannot be had. */
DS4_EXPORT double ds4_read_bandwidth(size_t bytes, int threads, int rounds) {
    if (threads < 1 || threads > 256 || bytes < (size_t)threads * 4096) return 0;
    bytes &= ~(size_t)4095;
    unsigned char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                                 -1, 0);
    if (memory == MAP_FAILED) return 0;
    madvise(memory, bytes, MADV_HUGEPAGE);
    for (size_t i = 0; i < bytes; i += 4096) memory[i] = (unsigned char)i;

    double best = 0;
    reader *readers = calloc((size_t)threads, sizeof *readers);
    pthread_t *ids = calloc((size_t)threads, sizeof *ids);
    for (int round = 0; readers && ids && round < rounds; round++) {
        pthread_barrier_t barrier;
        if (pthread_barrier_init(&barrier, NULL, (unsigned)threads)) break;
        size_t share = bytes / (size_t)threads & ~(size_t)4095;
        int started = 0;
        for (int t = 0; t < threads; t++) {
            readers[t] = (reader){(const vector *)(memory + share * (size_t)t),
                                  share / sizeof(vector), &barrier, 0, 0};
            if (t && pthread_create(&ids[t], NULL, read_all, &readers[t])) abort(); /* the barrier would never open */
            started++;
        }
        read_all(&readers[0]);
        double slowest = readers[0].seconds;
        for (int t = 1; t < started; t++) {
            pthread_join(ids[t], NULL);
            if (readers[t].seconds > slowest) slowest = readers[t].seconds;
        }
        pthread_barrier_destroy(&barrier);
        double rate = (double)share * threads / slowest;
        if (rate > best) best = rate;
    }
    free(readers);
    free(ids);
    munmap(memory, bytes);
    return best;
}
