/* replay: run the operations that standard input lists, and write their results.
 *
 * An operation is a line of words, followed by the bytes of its arrays; bytes of a target
 * are its content before the call. The result is a line with the error code, followed by
 * the bytes of the targets. SHAPE and STRIDES are RANK numbers each, in elements.
 *
 *   expand|compact DTYPE DTYPE RANK AXIS LENGTH POSITION PAD SHAPE STRIDES STRIDES BYTES
 *       BYTES: source, target
 *   mask DTYPE ROW_STRIDE LENGTH ATTENTION SINKS FIRST END FILL BYTES: mask
 *   rotate DTYPE RANK AXIS BASE SCALING ROTARY_DIM INTERLEAVED SHAPE STRIDES STRIDES
 *       BYTES BYTES BYTES: shifts, keys, target
 *   quantize|dequantize DTYPE RANK BITS GROUP SHAPE STRIDES
 *       BYTES BYTES BYTES BYTES: values, codes, scales, biases
 *   quantize_move|dequantize_move DTYPE RANK AXIS LENGTH POSITION BITS GROUP
 *       SHAPE STRIDES BYTES BYTES BYTES BYTES: values, codes, scales, biases
 */
#include <mlstate/kv.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_AXES = 8, MOST_BLOBS = 4 };

typedef struct blob {
    unsigned char *data;
    size_t size;
} blob;

static void fail(const char *problem)
{
    fprintf(stderr, "replay: %s\n", problem);
    exit(1);
}

static int64_t read_number(void)
{
    int64_t number = 0;
    if (scanf("%" SCNd64, &number) != 1) {
        fail("a number is missing");
    }
    return number;
}

static double read_real(void)
{
    double number = 0;
    if (scanf("%lf", &number) != 1) {
        fail("a number is missing");
    }
    return number;
}

static void read_numbers(int64_t *numbers, int64_t count)
{
    if (count < 0 || count > MOST_AXES) {
        fail("too many axes");
    }
    for (int64_t i = 0; i < count; i++) {
        numbers[i] = read_number();
    }
}

/* Read the sizes that end a line, then the bytes. The blobs stay allocated: the caller
 * frees them after the results are written. */
static void read_blobs(blob *blobs, int count)
{
    for (int i = 0; i < count; i++) {
        blobs[i].size = (size_t)read_number();
    }
    if (getchar() != '\n') {
        fail("a line is too long");
    }
    for (int i = 0; i < count; i++) {
        blobs[i].data = (unsigned char *)malloc(blobs[i].size + 1);
        if (blobs[i].data == NULL ||
            fread(blobs[i].data, 1, blobs[i].size, stdin) != blobs[i].size) {
            fail("bytes are missing");
        }
    }
}

static void write_blobs(int code, const blob *blobs, int count)
{
    printf("%d\n", code);
    for (int i = 0; i < count; i++) {
        if (fwrite(blobs[i].data, 1, blobs[i].size, stdout) != blobs[i].size) {
            fail("cannot write");
        }
    }
}

static void move(int is_expand, blob *blobs)
{
    int64_t shape[MOST_AXES], from[MOST_AXES], to[MOST_AXES];
    const int source_dtype = (int)read_number(), target_dtype = (int)read_number();
    const int rank = (int)read_number(), axis = (int)read_number();
    const int64_t length = read_number(), position = read_number();
    const double pad = read_real();
    read_numbers(shape, rank);
    read_numbers(from, rank);
    read_numbers(to, rank);
    read_blobs(blobs, 2);
    const int code = is_expand ? mlstate_kv_expand(blobs[0].data, source_dtype, from,
                                                   blobs[1].data, target_dtype, to, shape,
                                                   rank, axis, length, position, pad)
                               : mlstate_kv_compact(blobs[0].data, source_dtype, from,
                                                    blobs[1].data, target_dtype, to,
                                                    shape, rank, axis, length, position);
    write_blobs(code, blobs + 1, 1);
}

static void make_mask(blob *blobs)
{
    int64_t n[6];
    const int dtype = (int)read_number();
    read_numbers(n, 6);
    const double fill = read_real();
    read_blobs(blobs, 1);
    const int code =
        mlstate_kv_mask(blobs[0].data, dtype, n[0], n[1], n[2], n[3], n[4], n[5], fill);
    write_blobs(code, blobs, 1);
}

static void rotate(blob *blobs)
{
    int64_t shape[MOST_AXES], from[MOST_AXES], to[MOST_AXES];
    const int dtype = (int)read_number(), rank = (int)read_number();
    const int axis = (int)read_number();
    const double base = read_real(), scaling = read_real();
    const int64_t rotary_dim = read_number();
    const int is_interleaved = (int)read_number();
    read_numbers(shape, rank);
    read_numbers(from, rank);
    read_numbers(to, rank);
    read_blobs(blobs, 3);
    const int64_t *shifts = (const int64_t *)(const void *)blobs[0].data;
    const int code =
        mlstate_kv_rotate(blobs[1].data, from, blobs[2].data, to, dtype, shape, rank,
                          axis, shifts, (int64_t)(blobs[0].size / sizeof *shifts), base,
                          scaling, rotary_dim, is_interleaved);
    write_blobs(code, blobs + 2, 1);
}

static void quantize(int is_back, blob *blobs)
{
    int64_t shape[MOST_AXES], strides[MOST_AXES];
    const int dtype = (int)read_number(), rank = (int)read_number();
    const int bits = (int)read_number();
    const int64_t group = read_number();
    read_numbers(shape, rank);
    read_numbers(strides, rank);
    read_blobs(blobs, 4);
    uint32_t *codes = (uint32_t *)(void *)blobs[1].data;
    const int code =
        is_back ? mlstate_kv_dequantize(blobs[0].data, dtype, strides, shape, rank, bits,
                                        group, codes, blobs[2].data, blobs[3].data)
                : mlstate_kv_quantize(blobs[0].data, dtype, strides, shape, rank, bits,
                                      group, codes, blobs[2].data, blobs[3].data);
    write_blobs(code, is_back ? blobs : blobs + 1, is_back ? 1 : 3);
}

static void quantize_move(int is_back, blob *blobs)
{
    int64_t shape[MOST_AXES], strides[MOST_AXES];
    const int dtype = (int)read_number(), rank = (int)read_number();
    const int axis = (int)read_number();
    const int64_t length = read_number(), position = read_number();
    const int bits = (int)read_number();
    const int64_t group = read_number();
    read_numbers(shape, rank);
    read_numbers(strides, rank);
    read_blobs(blobs, 4);
    uint32_t *codes = (uint32_t *)(void *)blobs[1].data;
    const int code =
        is_back ? mlstate_kv_dequantize_move(blobs[0].data, dtype, strides, shape, rank,
                                             axis, length, position, bits, group, codes,
                                             blobs[2].data, blobs[3].data)
                : mlstate_kv_quantize_move(blobs[0].data, dtype, strides, shape, rank,
                                           axis, length, position, bits, group, codes,
                                           blobs[2].data, blobs[3].data);
    write_blobs(code, is_back ? blobs : blobs + 1, is_back ? 1 : 3);
}

int main(void)
{
    char name[16];
    while (scanf("%15s", name) == 1) {
        blob blobs[MOST_BLOBS] = {{NULL, 0}, {NULL, 0}, {NULL, 0}, {NULL, 0}};
        if (strcmp(name, "expand") == 0 || strcmp(name, "compact") == 0) {
            move(name[0] == 'e', blobs);
        } else if (strcmp(name, "mask") == 0) {
            make_mask(blobs);
        } else if (strcmp(name, "rotate") == 0) {
            rotate(blobs);
        } else if (strcmp(name, "quantize") == 0 || strcmp(name, "dequantize") == 0) {
            quantize(name[0] == 'd', blobs);
        } else if (strcmp(name, "quantize_move") == 0 ||
                   strcmp(name, "dequantize_move") == 0) {
            quantize_move(name[0] == 'd', blobs);
        } else {
            fail("unknown operation");
        }
        for (int i = 0; i < MOST_BLOBS; i++) {
            free(blobs[i].data);
        }
    }
    return fflush(stdout) == 0 ? 0 : 1;
}
