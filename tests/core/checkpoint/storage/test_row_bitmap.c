/* Rows: how shards are divided into rows, which rows are filled or changed, and runs of
 * rows. */
#include "checkpoint/storage/row_bitmap.h"

#include "runtime/thread_pool.h"
#include "support/random_bytes.h"
#include "support/runner.h"

#include <stdint.h>
#include <stdlib.h>

static mls_part box(int rank, size_t a, size_t b, size_t c)
{
    const size_t all = a * (rank > 1 ? b : 1) * (rank > 2 ? c : 1);
    return (mls_part){.rank = rank, .end = all, .length = {a, b, c}};
}

static mls_part flat(size_t count)
{
    return (mls_part){.rank = 2, .flat = true, .end = count, .length = {count, 1}};
}

static size_t row_of(mls_part part, size_t item)
{
    return mls_rows_of(&part, item).row;
}

TEST(row_size_follows_the_first_axis_within_bounds)
{
    CHECK(row_of(box(2, 50000, 768, 0), 4) == 768);
    CHECK(row_of(box(2, 50000, 64, 0), 4) == 64);
    CHECK(row_of(box(2, 50000, 63, 0), 4) == 126); /* 252 bytes: two rows */
    CHECK(row_of(box(2, 50000, 1, 0), 8) == 32);   /* 256 bytes */
    CHECK(row_of(box(2, 50000, 3, 0), 1) == 258);
    CHECK(row_of(box(3, 9, 16, 64), 4) == 1024);     /* all axes after the first */
    CHECK(row_of(box(3, 9, 1000, 3000), 4) == 3000); /* 12 MB are too large for a row */
    CHECK(row_of(box(2, 2, 1 << 20, 0), 2) == 32768);
    CHECK(row_of(box(1, 1000, 0, 0), 4) == 64);
    CHECK(row_of(box(1, 1000, 0, 0), 1) == 256);
    CHECK(row_of(flat(1000), 8) == 64 && row_of(flat(1000), 2) == 128);
    CHECK(row_of(box(0, 0, 0, 0), 4) == 64);
}

TEST(row_counts_include_the_short_last_row)
{
    const mls_row_cut rows = {.row = 64, .elements = 64 * 8 + 1, .item = 4};
    const mls_row_cut single = {.row = 64, .elements = 1, .item = 4};
    CHECK(mls_rows_count(&rows) == 9 && mls_rows_bitmap_bytes(&rows) == 2);
    CHECK(mls_rows_count(&single) == 1 && mls_rows_bitmap_bytes(&single) == 1);
}

TEST(any_set_bit_is_not_zero)
{
    unsigned char data[300] = {0};
    for (size_t length = 0; length < sizeof data; length += 7) {
        CHECK(mls_rows_are_zero(data, length));
        for (size_t i = 0; i < sizeof data; i++) {
            data[i] = 0x80; /* also the sign of a zero */
            CHECK(mls_rows_are_zero(data, length) == (i >= length));
            data[i] = 0;
        }
    }
}

/* The expected bit of a row, found byte by byte. */
static bool row_differs(const mls_row_cut *rows, size_t row, const unsigned char *a,
                        const unsigned char *b)
{
    size_t end = (row + 1) * rows->row;
    end = (end < rows->elements ? end : rows->elements) * rows->item;
    for (size_t i = row * rows->row * rows->item; i < end; i++) {
        if (a[i] != b[i]) {
            return true;
        }
    }
    return false;
}

/* Rows of any size, marked in pieces with arbitrary ends, compared with row_differs. */
TEST(bitmap_marks_filled_and_changed_rows)
{
    enum { MOST = 5000 };
    static unsigned char now[MOST * 4], zeros[MOST * 4];
    for (int turn = 0; turn < 300; turn++) {
        const mls_row_cut rows = {.row = 1 + below(90),
                                  .elements = 1 + below(MOST),
                                  .item = (size_t)1 << below(3)};
        const size_t count = mls_rows_count(&rows);
        unsigned char *filled = calloc(mls_rows_bitmap_bytes(&rows), 1);
        unsigned char *changed = calloc(mls_rows_bitmap_bytes(&rows), 1);
        REQUIRE(filled != NULL && changed != NULL);
        memset(now, 0, sizeof now);
        for (size_t i = below(40); i > 0; i--) {
            now[below(rows.elements * rows.item)] = (unsigned char)(1 + below(255));
        }
        size_t marked[2] = {0};
        for (size_t first = 0, n; first < rows.elements; first += n) {
            n = 1 + below(rows.elements - first);
            const size_t byte = first * rows.item;
            marked[0] += mls_rows_mark_filled(&rows, filled, first, n, now + byte);
            marked[1] +=
                mls_rows_mark_changed(&rows, changed, first, n, now + byte, zeros + byte);
        }
        size_t expected = 0;
        for (size_t row = 0; row < count; row++) {
            const bool is = row_differs(&rows, row, now, zeros);
            expected += is;
            CHECK((filled[row / 8] >> row % 8 & 1) == is);
        }
        CHECK(memcmp(filled, changed, mls_rows_bitmap_bytes(&rows)) == 0);
        CHECK(marked[0] == expected && marked[1] == expected);
        free(filled);
        free(changed);
    }
}

TEST(repeated_marks_count_a_row_once)
{
    const mls_row_cut rows = {.row = 4, .elements = 10, .item = 1};
    const unsigned char data[10] = {1, 0, 0, 1, 0, 0, 0, 0, 9, 0};
    unsigned char bits = 0;
    CHECK(mls_rows_mark_filled(&rows, &bits, 0, 2, data) == 1);
    CHECK(mls_rows_mark_filled(&rows, &bits, 2, 8, data + 2) == 1);
    CHECK(bits == (1 | 4));
}

/* Runs contain exactly the rows whose bits are set, and do not touch each other. */
TEST(row_ranges_match_the_bitmap)
{
    for (int turn = 0; turn < 500; turn++) {
        const mls_row_cut rows = {
            .row = 1 + below(9), .elements = 1 + below(700), .item = 2};
        const size_t count = mls_rows_count(&rows);
        unsigned char *bits = calloc(mls_rows_bitmap_bytes(&rows), 1);
        REQUIRE(bits != NULL);
        const size_t density = 1 + below(30);
        for (size_t row = 0; row < count; row++) {
            bits[row / 8] |= (unsigned char)((below(density) == 0) << row % 8);
        }
        const size_t runs = mls_rows_list_ranges(&rows, bits, NULL);
        mls_row_range *list = calloc(runs + 1, sizeof *list);
        REQUIRE(list != NULL);
        CHECK(mls_rows_list_ranges(&rows, bits, list) == runs && list[runs].count == 0);
        size_t at = 0, next = 0, element = 0;
        for (size_t i = 0; i < runs; i++) {
            CHECK(list[i].at == at && list[i].count > 0);
            CHECK(list[i].begin % rows.row == 0 && (i == 0 || list[i].begin > next));
            next = list[i].begin + list[i].count;
            CHECK(next % rows.row == 0 || next == rows.elements);
            at += list[i].count;
        }
        for (size_t i = 0; element < rows.elements; element++) {
            while (i < runs && list[i].begin + list[i].count <= element) {
                i++;
            }
            const size_t row = element / rows.row;
            CHECK((i < runs && list[i].begin <= element) ==
                  (bits[row / 8] >> row % 8 & 1));
        }
        free(list);
        free(bits);
    }
}

/* ---- threads ---- */

enum { TASKS = 64, TOGETHER = 4001 };

typedef struct marking {
    mls_row_cut rows;
    unsigned char *data, *bits;
    size_t marked[TASKS];
} marking;

static void mark_task(void *context, size_t index)
{
    marking *m = context;
    const size_t begin = TOGETHER * index / TASKS, end = TOGETHER * (index + 1) / TASKS;
    m->marked[index] =
        mls_rows_mark_filled(&m->rows, m->bits, begin, end - begin, m->data + begin);
}

/* Rows of three elements: tasks share rows, and bytes of the bitmap. */
TEST(threads_mark_rows_of_one_byte)
{
    mls_pool *pool = NULL;
    static unsigned char data[TOGETHER], bits[TOGETHER];
    marking m = {.rows = {3, TOGETHER, 1}, .data = data, .bits = bits};
    REQUIRE(mls_pool_new(4, &pool, &status) == MLS_OK);
    memset(data, 1, sizeof data);
    mls_pool_run(pool, mark_task, &m, TASKS);
    size_t marked = 0;
    for (size_t i = 0; i < TASKS; i++) {
        marked += m.marked[i];
    }
    mls_row_range run;
    CHECK(marked == mls_rows_count(&m.rows));
    CHECK(mls_rows_list_ranges(&m.rows, bits, NULL) == 1);
    CHECK(mls_rows_list_ranges(&m.rows, bits, &run) == 1 && run.count == TOGETHER);
    mls_pool_free(pool);
}
