/* Which kernel runs: instruction set detection and the dispatch by type and layout. */
#define _GNU_SOURCE
#include <stdlib.h>
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#include <asm/hwcap.h>
#ifndef HWCAP2_I8MM /* headers older than Linux 5.7 */
#define HWCAP2_I8MM (1 << 13)
#endif
#elif defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "quants.h"

#if defined(__x86_64__)
/* All that build.py lets the compiler use in *_avx2.c. */
static int has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
}

/* The bits of cpuid's answer that are asked for, in the register of that number (eax, ebx, ecx, edx). */
static int cpuid_says(unsigned leaf, unsigned part, int number, unsigned wanted) {
    unsigned a = leaf, b, c = part, d;
    __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    const unsigned answer[4] = {a, b, c, d};
    return (answer[number] & wanted) == wanted;
}

/* The same for *_avxvnni.c. A CPU with leaf 7, as every one with AVX2, answers 0 for parts that it lacks. */
static int ask_for_avxvnni(void) {
#if defined(DS4_NO_AVXVNNI) /* build.py: the compiler does not know it */
    return 0;
#else
    return has_avx2() && cpuid_says(7, 1, 0, 1u << 4);
#endif
}

/* Asked once: cpuid takes tens of microseconds in a virtual machine. */
static int has_avxvnni(void) {
    static _Atomic int answer = -1;
    if (answer < 0) answer = ask_for_avxvnni();
    return answer;
}

/* The same for *_avx512.c. */
static int has_avx512(void) {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi");
}

/* The CPU has int8 tiles, and the kernel lets this process keep their state: it asks to be asked. */
static int ask_for_amx(void) {
#if defined(__linux__) && !defined(DS4_NO_AMX)
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    const unsigned wanted = 1u << 24 | 1u << 25; /* amx-tile, amx-int8 */
    return has_avx512() && cpuid_says(7, 0, 3, wanted) &&
           !syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA);
#else
    return 0;
#endif
}

static int has_amx(void) {
    static _Atomic int answer = -1;
    if (answer < 0) answer = ask_for_amx();
    return answer;
}
#endif

int ds4_isa_runs(int isa) {
    if (isa == DS4_ISA_SCALAR) return 1;
#if defined(__x86_64__)
    if (isa == DS4_ISA_AVX2) return has_avx2();
    if (isa == DS4_ISA_AVXVNNI) return has_avxvnni();
    if (isa == DS4_ISA_AVX512) return has_avx512();
    return isa == DS4_ISA_AMX && has_amx();
#elif defined(__aarch64__) && defined(__linux__)
    const int neon = (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
    if (isa == DS4_ISA_I8MM) return neon && (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0;
    return isa == DS4_ISA_NEON && neon;
#elif defined(__aarch64__) && defined(__APPLE__)
    return isa == DS4_ISA_NEON; /* every Apple core since the M1 */
#else
    return 0;
#endif
}

int ds4_isa_best(void) {
    static const char *const names[DS4_ISAS] = {"scalar", "avx2", "neon", "avxvnni",
                                                "avx512", "amx",  "i8mm"};
    const char *wanted = getenv("DS4_ISA");
    if (wanted && *wanted) {
        for (int isa = 0; isa < DS4_ISAS; isa++)
            if (!strcmp(wanted, names[isa])) return ds4_isa_runs(isa) ? isa : DS4_ISA_SCALAR;
        return -1;
    }
    int best = DS4_ISAS - 1;
    while (!ds4_isa_runs(best)) best--;
    return best;
}

#if defined(__x86_64__)
static ds4_matmul_fn avx2_kernel(const ds4_quant *quant, uint32_t layout) {
    if (quant->act == DS4_ACT_F32) return ds4_matmul_avx2_float(quant->type, layout);
    if (quant->act == DS4_ACT_Q8_32) return ds4_matmul_avx2_legacy(quant->type, layout);
    return ds4_matmul_avx2_super(quant->type, layout);
}

/* Kernels of an instruction set where it has one; they hand rectangles that do not suit them on. */
static ds4_matmul_fn avxvnni_kernel(const ds4_quant *quant, uint32_t layout) {
    ds4_matmul_fn kernel = NULL;
#if !defined(DS4_NO_AVXVNNI)
    if (quant->act == DS4_ACT_Q8_32) kernel = ds4_matmul_avxvnni_legacy(quant->type, layout);
    if (quant->act == DS4_ACT_Q8_256) kernel = ds4_matmul_avxvnni_super(quant->type, layout);
#endif
    return kernel ? kernel : avx2_kernel(quant, layout);
}

static ds4_matmul_fn avx512_kernel(const ds4_quant *quant, uint32_t layout) {
    ds4_matmul_fn kernel = quant->act == DS4_ACT_Q8_32
                               ? ds4_matmul_avx512_legacy(quant->type, layout)
                               : ds4_matmul_avx512_super(quant->type, layout);
    return kernel ? kernel : avx2_kernel(quant, layout);
}

static ds4_matmul_fn amx_kernel(const ds4_quant *quant, uint32_t layout) {
    ds4_matmul_fn kernel = NULL;
#if !defined(DS4_NO_AMX)
    if (quant->act == DS4_ACT_Q8_32)
        kernel = ds4_matmul_amx_legacy(quant->type, layout);
    else if (layout <= DS4_LAYOUT_X8)
        kernel = ds4_matmul_amx_super(quant->type, layout);
#endif
    return kernel ? kernel : avx512_kernel(quant, layout);
}
#endif

#if defined(__aarch64__)
static ds4_matmul_fn neon_kernel(const ds4_quant *quant, uint32_t layout) {
    if (quant->act == DS4_ACT_F32) return ds4_matmul_neon_float(quant->type, layout);
    if (quant->act == DS4_ACT_Q8_32) return ds4_matmul_neon_legacy(quant->type, layout);
    return ds4_matmul_neon_super(quant->type, layout);
}

/* Kernels where products of matrices help; they hand few columns on. */
static ds4_matmul_fn i8mm_kernel(const ds4_quant *quant, uint32_t layout) {
    ds4_matmul_fn kernel = quant->act == DS4_ACT_Q8_32    ? ds4_matmul_i8mm_legacy(quant->type, layout)
                           : quant->act == DS4_ACT_Q8_256 ? ds4_matmul_i8mm_super(quant->type, layout)
                                                          : NULL;
    return kernel ? kernel : neon_kernel(quant, layout);
}
#endif

ds4_matmul_fn ds4_matmul_kernel(uint32_t type, uint32_t layout, int isa) {
    const ds4_quant *quant = ds4_quant_find(type);
    if (!ds4_layout_exists(type, layout)) return NULL;
    if (isa == DS4_ISA_SCALAR) return ds4_matmul_scalar(type, layout);
#if defined(__x86_64__)
    if (isa == DS4_ISA_AVX2) return avx2_kernel(quant, layout);
    if (isa == DS4_ISA_AVXVNNI) return avxvnni_kernel(quant, layout);
    if (isa == DS4_ISA_AVX512) return avx512_kernel(quant, layout);
    if (isa == DS4_ISA_AMX) return has_amx() ? amx_kernel(quant, layout) : NULL;
#elif defined(__aarch64__)
    if (isa == DS4_ISA_NEON) return neon_kernel(quant, layout);
    if (isa == DS4_ISA_I8MM) return i8mm_kernel(quant, layout);
#endif
    return NULL;
}
