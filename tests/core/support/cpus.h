/* cpus: the instruction sets of this machine. */
#ifndef MLS_CPUS_H
#define MLS_CPUS_H

#include "runtime/cpu_features.h"
#include "support/runner.h"

/* For each set that this machine has: all of them, or without the scalar one, which is
 * the oracle. */
#define EACH_CPU(cpu)        EACH_CPU_FROM(MLS_CPU_SCALAR, cpu)
#define EACH_VECTOR_CPU(cpu) EACH_CPU_FROM((mls_cpu)(MLS_CPU_SCALAR + 1), cpu)
#define EACH_CPU_FROM(first, cpu)                                                        \
    for (mls_cpu cpu = (first); cpu < MLS_CPU_COUNT; cpu = (mls_cpu)(cpu + 1))           \
        if (mls_cpu_offers(cpu))

/* The fastest. */
static inline mls_cpu best_cpu(void)
{
    mls_cpu cpu = MLS_CPU_SCALAR;
    mls_status st;
    CHECK(mls_cpu_choose(NULL, &cpu, &st) == MLS_OK);
    return cpu;
}

#endif
