#include "state/metadata_compare.h"
#include "support/runner.h"

static const size_t two_three[] = {2, 3};
static const size_t three_two[] = {3, 2};

static mls_facts facts(const size_t *shape, int rank, const char *dtype)
{
    return (mls_facts){.shape = shape, .rank = rank, .dtype = dtype};
}

static mls_fact_pair both(mls_facts source, mls_facts target)
{
    return (mls_fact_pair){
        .source = source, .target = target, .has_source = true, .has_target = true};
}

static void shapes_differ_by_rank_or_by_a_dimension(void)
{
    const mls_facts a = facts(two_three, 2, "float32");
    const mls_facts turned = facts(three_two, 2, "float32");
    const mls_facts shorter = facts(two_three, 1, "float32");
    const mls_facts scalar = facts(NULL, 0, "float32");
    CHECK(mls_facts_same_shape(&a, &a));
    CHECK(!mls_facts_same_shape(&a, &turned));
    CHECK(!mls_facts_same_shape(&a, &shorter) && !mls_facts_same_shape(&shorter, &a));
    CHECK(mls_facts_same_shape(&scalar, &scalar) && !mls_facts_same_shape(&scalar, &a));
}

static void dtypes_are_compared_as_text(void)
{
    char copy[] = "float32";
    const mls_facts a = facts(two_three, 2, "float32");
    const mls_facts same = facts(two_three, 2, copy);
    const mls_facts other = facts(two_three, 2, "float16");
    CHECK(mls_facts_same_dtype(&a, &same) && !mls_facts_same_dtype(&a, &other));
}

static void each_pair_gets_its_bits_and_all_are_counted(void)
{
    const mls_facts a = facts(two_three, 2, "float32");
    const mls_facts turned = facts(three_two, 2, "float32");
    const mls_facts half = facts(two_three, 2, "float16");
    const mls_facts both_differ = facts(three_two, 2, "float16");
    const mls_fact_pair pairs[] = {
        both(a, a),
        {.source = a, .has_source = true},
        {.target = a, .has_target = true},
        both(a, turned),
        both(a, half),
        both(a, both_differ),
    };
    const unsigned char wanted[] = {
        MLS_SAME,          MLS_MISSING,       MLS_UNEXPECTED,
        MLS_SHAPE_DIFFERS, MLS_DTYPE_DIFFERS, MLS_SHAPE_DIFFERS | MLS_DTYPE_DIFFERS};
    unsigned char bits[6];
    const mls_compat_counts counts = mls_compat_compare(pairs, 6, bits);
    CHECK(memcmp(bits, wanted, sizeof wanted) == 0);
    CHECK(counts.missing == 1 && counts.unexpected == 1);
    CHECK(counts.shapes == 2 && counts.dtypes == 2 && counts.same == 1);
}

static void nothing_has_no_differences(void)
{
    const mls_compat_counts counts = mls_compat_compare(NULL, 0, NULL);
    CHECK(counts.missing + counts.unexpected + counts.shapes + counts.dtypes == 0);
    CHECK(counts.same == 0);
}

static void a_digest_begins_with_lengths_and_dimensions(void)
{
    static const size_t dims[] = {3, 258};
    const mls_facts facts = {.shape = dims, .dtype = "float32", .rank = 2};
    const unsigned char expected[] = {2, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0,
                                      0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0,
                                      0, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0};
    unsigned char head[MLS_FACTS_HEAD_MOST];
    CHECK(mls_facts_head((mls_text){"ab", 2}, &facts, head) == sizeof expected);
    CHECK(memcmp(head, expected, sizeof expected) == 0);
}

static const test_case tests[] = {
    TEST(a_digest_begins_with_lengths_and_dimensions),
    TEST(shapes_differ_by_rank_or_by_a_dimension),
    TEST(dtypes_are_compared_as_text),
    TEST(each_pair_gets_its_bits_and_all_are_counted),
    TEST(nothing_has_no_differences),
};

int main(void)
{
    return RUN_TESTS(tests);
}
