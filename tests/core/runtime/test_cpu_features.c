#include "runtime/cpu_features.h"
#include "support/runner.h"

TEST(scalar_is_always_available)
{
    mls_cpu cpu = MLS_CPU_COUNT;
    CHECK(mls_cpu_offers(MLS_CPU_SCALAR));
    CHECK(mls_cpu_choose("scalar", &cpu, &status) == MLS_OK && cpu == MLS_CPU_SCALAR);
}

TEST(default_is_the_best_available_set)
{
    mls_cpu cpu = MLS_CPU_COUNT, same = MLS_CPU_COUNT;
    CHECK(mls_cpu_choose(NULL, &cpu, &status) == MLS_OK && mls_cpu_offers(cpu));
    CHECK(mls_cpu_choose("", &same, &status) == MLS_OK && same == cpu);
    for (int better = (int)cpu + 1; better < MLS_CPU_COUNT; better++) {
        CHECK(!mls_cpu_offers((mls_cpu)better));
    }
}

TEST(available_sets_are_selected_by_name)
{
    for (int i = 0; i < MLS_CPU_COUNT; i++) {
        mls_cpu cpu = MLS_CPU_COUNT;
        const mls_code code = mls_cpu_choose(mls_cpu_name((mls_cpu)i), &cpu, &status);
        CHECK((code == MLS_OK) == mls_cpu_offers((mls_cpu)i));
        CHECK(code != MLS_OK || (int)cpu == i);
    }
}

TEST(unknown_name_error_lists_available_sets)
{
    mls_cpu cpu = MLS_CPU_COUNT;
    char text[MLS_TEXT_BYTES] =
        "instruction set 'mmx' is not offered here; choose one of: scalar";
    for (int i = MLS_CPU_SCALAR + 1; i < MLS_CPU_COUNT; i++) {
        if (mls_cpu_offers((mls_cpu)i)) {
            strcat(strcat(text, ", "), mls_cpu_name((mls_cpu)i));
        }
    }
    CHECK_FAILS(mls_cpu_choose("mmx", &cpu, &status), MLS_E_VALUE, text);
    CHECK(cpu == MLS_CPU_COUNT);
}

TEST(processor_count_is_positive)
{
    CHECK(mls_cpu_count() >= 1 && mls_cpu_count() < 100000);
}

TEST(memory_advice_choice_is_stable)
{
    const bool first = mls_cpu_follows_runs();
    CHECK(mls_cpu_follows_runs() == first);
}
