/* Tests of digest.c: parts that do not fit, and the bits of every instruction set and
 * machine. Python's tests compare the values with the definition. */
#include "state/digest.h"

#include "support/cpus.h"
#include "support/random_bytes.h"
#include "support/tensors.h"

#include <string.h>

enum { ROWS = 300, COLUMNS = 700 };

static unsigned char bytes[4 * ROWS * COLUMNS];
static mls_digest_keys keys;

TEST(parts_that_do_not_fit_are_refused)
{
    static const struct {
        size_t shape[2], starts[2];
        mls_code code;
        const char *text;
    } rows[] = {
        {{5, 4},
         {2, 0},
         MLS_E_SHAPE,
         "axis 0 has 4 elements from 2 on, more than the 5 of the whole tensor"},
        {{8, 4},
         {0, 9},
         MLS_E_SHAPE,
         "axis 1 has 4 elements from 9 on, more than the 4 of the whole tensor"},
        {{SIZE_MAX / 2, 8}, {0, 0}, MLS_E_SIZE, "the tensor exceeds the address space"},
    };
    const mls_tensor part = matrix_of(bytes, MLS_F32, 4, 4);
    const mls_digester digester = {.keys = &keys, .cpu = MLS_CPU_SCALAR};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        mls_digest sum = {{1, 2}};
        mls_status st;
        CHECK(mls_digest_part(&digester, &part, rows[i].shape, rows[i].starts, &sum,
                              &st) == rows[i].code);
        CHECK_TEXT(st.text, rows[i].text);
        CHECK(sum.lanes[0] == 1 && sum.lanes[1] == 2);
    }
}

TEST(every_instruction_set_has_the_scalar_bits)
{
    static const mls_digest defined = {{0xA67B6F7A08AE01E4, 0x73BFB798EE0588D8}};
    const size_t shape[2] = {ROWS, COLUMNS}, none[2] = {0, 0};
    mls_digest_keys_init(&keys);
    fill_random(bytes, sizeof bytes, 3);
    const mls_tensor views[] = {matrix_of(bytes, MLS_F32, ROWS, COLUMNS),
                                transposed_of(bytes, MLS_F32, ROWS, COLUMNS),
                                matrix_of(bytes + 3, MLS_U8, ROWS, COLUMNS)};
    for (size_t i = 0; i < sizeof views / sizeof *views; i++) {
        mls_digest scalar = {{0}};
        for (int cpu = 0; cpu < MLS_CPU_COUNT; cpu++) {
            mls_digest sum = {{0}};
            mls_status st;
            const mls_digester digester = {.keys = &keys, .cpu = (mls_cpu)cpu};
            if (mls_cpu_offers((mls_cpu)cpu)) {
                CHECK(mls_digest_part(&digester, &views[i], shape, none, &sum, &st) ==
                      MLS_OK);
                scalar = cpu == MLS_CPU_SCALAR ? sum : scalar;
                CHECK(memcmp(&sum, i == 0 ? &defined : &scalar, sizeof sum) == 0);
            }
        }
    }
}
