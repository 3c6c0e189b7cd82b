#define _DEFAULT_SOURCE

#include "kernel_support.h"

#include <sys/mman.h>
#include <unistd.h>

enum { GUARD = 128 };

struct fence fence_new(size_t size) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size = (size + GUARD + page - 1) / page * page;
    char *start =
        mmap(NULL, size + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(start != MAP_FAILED);
    CHECK(mprotect(start + size, page, PROT_NONE) == 0);
    return (struct fence){.end = start + size, .size = size};
}

void fence_free(struct fence *fence) {
    munmap(fence->end - fence->size, fence->size + (size_t)sysconf(_SC_PAGESIZE));
}

void *fence_take(const struct fence *fence, size_t bytes) {
    CHECK(bytes + GUARD <= fence->size);
    memset(fence->end - bytes - GUARD, 0xa5, GUARD);
    return memset(fence->end - bytes, 0xff, bytes);
}

void fence_check(const struct fence *fence, size_t bytes) {
    for (size_t i = 1; i <= GUARD; i++) {
        CHECK((unsigned char)*(fence->end - bytes - i) == 0xa5);
    }
}

bool is_in_blocks(enum ck_row_type type) {
    return type == CK_ROW_Q8_0 || type == CK_ROW_Q4_0;
}

static size_t block_bytes(enum ck_row_type type) {
    return type == CK_ROW_Q8_0 ? 34 : 18;
}

size_t row_bytes(enum ck_row_type type, int32_t n) {
    if (is_in_blocks(type)) {
        return (size_t)(n / CK_BLOCK) * block_bytes(type);
    }
    return (size_t)n * (type == CK_ROW_F32 ? 4 : 2);
}

/* A number of 16 bits, with so many of them for its exponent. */
static double small_float(const char *at, int exponent_bits) {
    uint16_t bits;
    memcpy(&bits, at, sizeof bits);
    int mantissa_bits = 15 - exponent_bits;
    int exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1);
    int mantissa = bits & ((1 << mantissa_bits) - 1);
    int bias = (1 << (exponent_bits - 1)) - 1;
    double magnitude;
    if (exponent == (1 << exponent_bits) - 1) {
        magnitude = mantissa ? (double)NAN : (double)INFINITY;
    } else if (exponent == 0) {
        magnitude = ldexp(mantissa, 1 - bias - mantissa_bits);
    } else {
        magnitude = ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
    }
    return bits & 0x8000 ? -magnitude : magnitude;
}

static int block_number(const unsigned char *numbers, enum ck_row_type type, int32_t i) {
    if (type == CK_ROW_Q8_0) {
        return numbers[i] < 128 ? numbers[i] : numbers[i] - 256;
    }
    return (i < 16 ? numbers[i] % 16 : numbers[i - 16] / 16) - 8;
}

double stored_value(const char *row, enum ck_row_type type, int32_t i) {
    if (type == CK_ROW_F32) {
        float value;
        memcpy(&value, row + (size_t)i * sizeof value, sizeof value);
        return value;
    }
    if (!is_in_blocks(type)) {
        return small_float(row + (size_t)i * 2, type == CK_ROW_F16 ? 5 : 8);
    }
    const char *block = row + (size_t)(i / CK_BLOCK) * block_bytes(type);
    const unsigned char *numbers = (const unsigned char *)block + 2;
    return small_float(block, 5) * block_number(numbers, type, i % CK_BLOCK);
}

/* `small`: subnormal; else at least 2 ^ (least - 15). */
static uint16_t random_f16(struct dice *dice, bool small, uint32_t least) {
    uint32_t exponent = small ? 0 : least + roll(dice, 6);
    return (uint16_t)(roll(dice, 2) << 15 | exponent << 10 | roll(dice, 1024));
}

static void store_random_block(struct dice *dice, char *block, enum ck_row_type type) {
    bool small = roll(dice, 16) == 0;
    uint16_t scale = random_f16(dice, small, type == CK_ROW_Q8_0 ? 3 : 7);
    memcpy(block, &scale, sizeof scale);
    for (size_t i = 2; i < block_bytes(type); i++) {
        block[i] = (char)roll(dice, 256);
    }
}

static void store_random_element(struct dice *dice, char *at, enum ck_row_type type) {
    if (type == CK_ROW_F32) {
        float value = random_float(dice, 2);
        memcpy(at, &value, sizeof value);
        return;
    }
    uint16_t bits;
    if (type == CK_ROW_F16) {
        bits = random_f16(dice, roll(dice, 16) == 0, 10);
    } else {
        bits = (uint16_t)(roll(dice, 2) << 15 | (122 + roll(dice, 6)) << 7 | roll(dice, 128));
    }
    memcpy(at, &bits, sizeof bits);
}

void store_random(struct dice *dice, char *row, enum ck_row_type type, int32_t width) {
    int32_t step = is_in_blocks(type) ? CK_BLOCK : 1;
    for (int32_t i = 0; i < width; i += step) {
        if (is_in_blocks(type)) {
            store_random_block(dice, row + row_bytes(type, i), type);
        } else {
            store_random_element(dice, row + row_bytes(type, i), type);
        }
    }
}

float random_float(struct dice *dice, float limit) {
    return ((float)roll(dice, 2000001) / 1e6F - 1) * limit;
}

static void shuffle(struct dice *dice, int32_t *items, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        items[i] = i;
    }
    for (int32_t i = n - 1; i > 0; i--) {
        int32_t other = (int32_t)roll(dice, (uint32_t)i + 1);
        int32_t item = items[i];
        items[i] = items[other];
        items[other] = item;
    }
}

void rows_new(struct rows *rows, const struct fence *fence, struct dice *dice,
              enum ck_row_type type, int32_t width, int32_t n_cells) {
    enum { MOST_ROWS = 2 * CK_TILE };
    int32_t order[MOST_ROWS];
    int32_t n_rows = n_cells + (int32_t)roll(dice, MOST_ROWS - (uint32_t)n_cells + 1);
    size_t alignment = type == CK_ROW_F32 ? 4 : 2;
    size_t bytes = row_bytes(type, width);
    size_t stride = bytes * (1 + roll(dice, 3)) + roll(dice, 3) * alignment;
    char *first = fence_take(fence, (size_t)(n_rows - 1) * stride + bytes);
    shuffle(dice, order, n_rows);
    *rows = (struct rows){
        .tile = {.rows = first, .stride = stride, .width = width, .n_cells = n_cells},
        .values = malloc((size_t)n_cells * (size_t)width * sizeof(double)),
    };
    for (int32_t c = 0; c < n_cells; c++) {
        char *row = first + (size_t)order[c] * stride;
        rows->cells[c] = order[c];
        store_random(dice, row, type, width);
        for (int32_t i = 0; i < width; i++) {
            rows->values[c * width + i] = stored_value(row, type, i);
        }
    }
    rows->tile.n_upcoming = (int32_t)roll(dice, CK_TILE + 1);
    for (int32_t i = 0; i < rows->tile.n_upcoming; i++) {
        rows->upcoming[i] = order[roll(dice, (uint32_t)n_rows)];
    }
    rows->tile.cells = rows->cells;
    rows->tile.upcoming = rows->upcoming;
    rows->tile.upcoming_rows = first;
    rows->tile.upcoming_bytes = 1 + roll(dice, (uint32_t)stride);
}

void rows_free(struct rows *rows) {
    free(rows->values);
}
