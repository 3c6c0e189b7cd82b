#include "kernel_support.h"
void bench(const char *isa_name) {
    (void)isa_name;
}
