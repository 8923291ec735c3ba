/* A pool of threads that runs chains of parallel sections with little overhead.
 *
 * Owns: who runs which task, and when the next section may start. Every thread has a run of tasks of
 * its own, so that drawing one touches no memory of another thread; who is through takes from the end of
 * others' runs. A section ends when all its tasks are complete - not when all threads have arrived: a
 * thread that the system has taken off its core holds up nothing unless it is inside a task. Who sees that
 * runs `advance` (and with it all serial work) on the spot: as a rule the thread that did so before,
 * whose caches have what that needs, and any other when that one is late. Idle threads spin briefly,
 * then sleep on a futex. Refuses: to allocate or to block while a job runs.
 */
#ifndef DS4_POOL_H
#define DS4_POOL_H

#include <stdint.h>

#define DS4_POOL_MAX_THREADS 256
#define DS4_POOL_MAX_TASKS 4000

typedef struct ds4_pool ds4_pool;

typedef struct {
    uint32_t tasks; /* 1..DS4_POOL_MAX_TASKS, or 0: the job is done */
    uint32_t batch; /* most tasks that a thread draws at once, of its own; 0 or 1: one by one */
} ds4_pool_section;

typedef struct {
    /* Called by one thread at a time, between sections: prepares the next one. */
    ds4_pool_section (*advance)(void *context, int thread);
    /* Runs tasks [first, first + count). */
    void (*task)(void *context, uint32_t first, uint32_t count, int thread);
    void *context;
    const void *notes; /* what advance writes and tasks read first: fetched by all who begin */
    uint32_t notes_bytes;
    /* A little of what a thread may do while it waits; returns whether there is more. Or NULL. */
    int (*meanwhile)(void *context, int thread);
} ds4_pool_job;

/* threads >= 1, the caller of ds4_pool_run included. NULL when threads cannot be started. */
ds4_pool *ds4_pool_open(int threads, const ds4_pool_job *job);
void ds4_pool_close(ds4_pool *pool);
/* Runs the pool's job to its end. One caller at a time. */
void ds4_pool_run(ds4_pool *pool);

#endif
