#include "architecture.h"

#include <string.h>

static const struct ck_architecture *const architectures[] = {
    &ck_architecture_llama,
};

const struct ck_architecture *ck_architecture_find(const char *name) {
    for (size_t i = 0; i < sizeof architectures / sizeof *architectures; i++) {
        if (strcmp(architectures[i]->name, name) == 0) {
            return architectures[i];
        }
    }
    return NULL;
}
