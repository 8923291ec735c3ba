/* A pool of threads that runs chains of parallel sections with little overhead.
 *
 * Owns: who runs which task, and when the next section may start. A section ends when all its tasks
 * are complete - not when all threads have arrived: a thread that the system has taken off its core
 * holds up nothing unless it is inside a task. Whoever completes the last task of a section runs
 * `advance` (and with it all serial work) on the spot. Idle threads spin briefly, then sleep on a
 * futex. Refuses: to allocate or to block while a job runs.
 */
#ifndef DS4_POOL_H
#define DS4_POOL_H

#include <stdint.h>

#define DS4_POOL_MAX_THREADS 256
#define DS4_POOL_MAX_TASKS 60000

typedef struct ds4_pool ds4_pool;

typedef struct {
    /* Called by one thread at a time, between sections: prepares the next one and returns its number
     * of tasks (1..DS4_POOL_MAX_TASKS), or 0 when the job is done. */
    uint32_t (*advance)(void *context, int thread);
    void (*task)(void *context, uint32_t index, int thread);
    void *context;
} ds4_pool_job;

/* threads >= 1, the caller of ds4_pool_run included. NULL when threads cannot be started. */
ds4_pool *ds4_pool_open(int threads);
void ds4_pool_close(ds4_pool *pool);
/* Runs a job to its end. One caller at a time. */
void ds4_pool_run(ds4_pool *pool, const ds4_pool_job *job);

#endif
