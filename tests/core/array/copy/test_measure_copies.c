/* Decisions by trials in temporary memory. */
#include "array/copy/measure_copies.h"
#include "support/cpus.h"
#include "support/runner.h"

enum { MIB = 1 << 20 };

/* Return whether the decision for touched memory has been made. */
static bool is_decided(mls_store_choices *choices, mls_store_operation operation,
                       mls_store_size size)
{
    mls_store_choice *choice = &choices->choice[operation][size][0];
    return atomic_load(&choice->is_decided) && atomic_load(&choice->chosen) >= 0;
}

/* Measure with results of 16 MiB in one size class, and check its decisions. */
static void measure(mls_cpu cpu, mls_store_size size, size_t past)
{
    mls_store_choices choices;
    mls_kernels kernels = *mls_kernels_of(cpu);
    const mls_crc_kernels *crc = mls_crc_of(cpu);
    REQUIRE(mls_store_choices_init(&choices, "auto", &status) == MLS_OK);
    choices.least[MLS_STORING_WITHIN] = 4 * MIB;
    choices.least[MLS_STORING_WITHIN_4X] = past;
    choices.least[MLS_STORING_WITHIN_16X] = past;
    choices.least[MLS_STORING_PAST] = past;
    kernels.choices = &choices;
    CHECK(mls_measure_copies(&kernels, crc, &status) == MLS_OK);
    CHECK(is_decided(&choices, MLS_STORING_COPY, size) == (kernels.copy_variants > 1));
    CHECK(is_decided(&choices, MLS_STORING_FILL, size) == (kernels.variants > 1));
    CHECK(is_decided(&choices, MLS_STORING_NARROW, size) == (kernels.variants > 1));
    CHECK(is_decided(&choices, MLS_STORING_WIDEN, size) == (kernels.variants > 1));
    CHECK(is_decided(&choices, MLS_STORING_CHECKSUM, size) == (crc->copy_variants > 1));
    CHECK(!is_decided(&choices, MLS_STORING_REDUCE, size));
    for (int small = MLS_STORING_SMALL; small < MLS_STORING_WITHIN; small++) {
        CHECK(is_decided(&choices, MLS_STORING_COPY, (mls_store_size)small) ==
              (kernels.copy_variants > 1));
    }
}

TEST(measuring_decides_every_operation_and_size_class)
{
    EACH_CPU (cpu) {
        measure(cpu, MLS_STORING_PAST, 4 * MIB);
        measure(cpu, MLS_STORING_WITHIN, 64 * MIB);
    }
}

TEST(forced_variant_skips_measuring)
{
    mls_store_choices choices;
    mls_kernels kernels = *mls_kernels_of(best_cpu());
    REQUIRE(mls_store_choices_init(&choices, "plain", &status) == MLS_OK);
    kernels.choices = &choices;
    CHECK(mls_measure_copies(&kernels, &mls_crc_scalar, &status) == MLS_OK);
    CHECK(!is_decided(&choices, MLS_STORING_COPY, MLS_STORING_PAST));
}
