/* Which kernels this build has, which of them this CPU can run, and their tables. */
#include "attention/kernels/kernels.h"

#include <assert.h>
#include <pthread.h>

#include "attention/kernels/isa.h"

#if defined(CK_HAVE_AVX2) || defined(CK_HAVE_AVX512)
#include <cpuid.h>

static bool cpu_has_avx2(void) {
    /* Not every compiler's __builtin_cpu_supports() knows f16c. */
    unsigned a, b, c, d;
    bool f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
    return f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
#endif

#ifdef CK_HAVE_AVX512
static bool cpu_has_avx512(void) {
    return cpu_has_avx2() && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
}
#endif

const char *ck_isa_name(enum ck_isa isa) {
    static const char *const names[CK_N_ISAS] = {
        [CK_ISA_C] = "c",
        [CK_ISA_AVX2] = "avx2",
        [CK_ISA_AVX512] = "avx512",
        [CK_ISA_NEON] = "neon",
    };
    assert(isa < CK_N_ISAS);
    return names[isa];
}

bool ck_isa_is_available(enum ck_isa isa) {
    switch (isa) {
    case CK_ISA_C:
        return true;
#ifdef CK_HAVE_AVX2
    case CK_ISA_AVX2:
        return cpu_has_avx2();
#endif
#ifdef CK_HAVE_AVX512
    case CK_ISA_AVX512:
        return cpu_has_avx512();
#endif
#ifdef CK_HAVE_NEON
    case CK_ISA_NEON: /* a part of every aarch64 */
        return true;
#endif
    default:
        return false;
    }
}

enum ck_isa ck_isa_best(void) {
    int isa = CK_N_ISAS - 1;
    while (!ck_isa_is_available((enum ck_isa)isa)) {
        isa--;
    }
    return (enum ck_isa)isa;
}

typedef void (*init_function)(struct ck_kernels *kernels);

static const init_function inits[CK_N_ISAS] = {
    [CK_ISA_C] = ck_init_c,
#ifdef CK_HAVE_AVX2
    [CK_ISA_AVX2] = ck_init_avx2,
#endif
#ifdef CK_HAVE_AVX512
    [CK_ISA_AVX512] = ck_init_avx512,
#endif
#ifdef CK_HAVE_NEON
    [CK_ISA_NEON] = ck_init_neon,
#endif
};

static struct ck_kernels tables[CK_N_ISAS];
static pthread_once_t tables_once = PTHREAD_ONCE_INIT;

static void fill_tables(void) {
    for (int isa = 0; isa < CK_N_ISAS; isa++) {
        /* Where it is not available, even init may use instructions that the CPU lacks. */
        if (ck_isa_is_available((enum ck_isa)isa)) {
            inits[isa](&tables[isa]);
        }
        tables[isa].name = ck_isa_name((enum ck_isa)isa);
    }
}

const struct ck_kernels *ck_kernels(enum ck_isa isa) {
    assert(ck_isa_is_available(isa));
    pthread_once(&tables_once, fill_tables);
    return &tables[isa];
}
