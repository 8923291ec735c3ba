/* The built-in profile: what each section took, and what of it was spent in tasks.
 *
 * While a step runs, a thread writes to memory of its own only; the sums are made when it has ended. The
 * clock's own cost is measured when the profile is switched on and taken off: a section reads it
 * once, a thread twice for tasks that it draws together, of which one read falls between the two stamps.
 */
#include <string.h>
#include <time.h>

#include "exec.h"

static uint64_t nanoseconds_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* The CPU's own counter where there is one: it costs a third of the system's clock. */
uint64_t ds4_ticks(void) {
#if defined(__x86_64__)
    return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
    uint64_t ticks;
    __asm__ volatile("mrs %0, cntvct_el0" : "=r"(ticks));
    return ticks;
#else
    return nanoseconds_now();
#endif
}

/* Ticks of one reading: the best of some rows of them, because others may have the core meanwhile. */
static double reading_ticks(void) {
    enum { ROWS = 16, READINGS = 64 };
    uint64_t best = UINT64_MAX;
    for (int row = 0; row < ROWS; row++) {
        uint64_t first = ds4_ticks(), last = first;
        for (int i = 0; i < READINGS; i++) last = ds4_ticks();
        if (last - first < best) best = last - first;
    }
    return (double)best / READINGS;
}

/* From one reading to another, which another core may have made: its counter may lag behind a little. */
static double between(uint64_t from, uint64_t to) { return (double)(int64_t)(to - from); }

/* Adds the step that has just ended. Entry n_sections + 1 is what lies around the sections: checks, the
 * angles of stage 0, ending. */
void ds4_profile_step(ds4_engine *e, uint64_t entered) {
    ds4_profile *p = &e->profile;
    uint32_t stages = e->image.header->n_sections + 2;
    p->sums[stages - 1].whole += between(p->started[stages], ds4_ticks());
    for (uint32_t stage = 0; stage < stages; stage++) {
        double busiest = 0.0, readings = 1.0, work = 0.0;
        for (uint32_t i = 0; i < e->config.threads; i++) {
            ds4_spent *s = p->spent + (uint64_t)i * p->stride + stage;
            double busy = (double)s->ticks - (double)s->spans * p->reading;
            work += busy > 0.0 ? busy : 0.0;
            if (busy > busiest) {
                busiest = busy;
                readings = 1.0 + 2.0 * (double)s->spans;
            }
            *s = (ds4_spent){0, 0};
        }
        uint64_t began = stage ? p->started[stage] : entered;
        double whole = between(began, p->started[stage + 1]) - readings * p->reading;
        ds4_section_time *sum = p->sums + (stage ? stage - 1 : stages - 1);
        sum->whole += whole > busiest ? whole : busiest;
        sum->busiest += busiest;
        sum->work += work;
    }
}

void ds4_engine_profile(ds4_engine *e, int enabled, double *times, int32_t *kinds) {
    ds4_profile *p = &e->profile;
    uint32_t n = e->image.header->n_sections;
    double ticks = (double)(ds4_ticks() - p->enabled_ticks);
    double scale = ticks > 0.0 ? (double)(nanoseconds_now() - p->enabled_nanoseconds) / ticks : 0.0;
    for (uint32_t i = 0; i < n + 2; i++, times += 3) {
        times[0] = p->sums[i].whole * scale;
        times[1] = p->sums[i].busiest * scale;
        times[2] = p->sums[i].work * scale;
        kinds[i] = i < n ? (int32_t)e->image.sections[i].kind : (int32_t)(DS4_SECTION_KINDS + i - n);
    }
    memset(p->sums, 0, (n + 2) * sizeof *p->sums);
    p->enabled = enabled;
    if (!enabled) return;
    p->reading = reading_ticks();
    p->enabled_nanoseconds = nanoseconds_now();
    p->enabled_ticks = ds4_ticks();
}
