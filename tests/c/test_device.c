/* Texts that name devices, what a device is trusted to do, and addresses of servers. */
#define _POSIX_C_SOURCE 200112L
#include <arpa/inet.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cellkv/cache.h>
#include <cellkv/device.h>
#include <ggml-backend.h>

#include "check.h"
#include "storage/device.h"

enum { N_LAYERS = 5 };

static ggml_backend_dev_t of_layer[N_LAYERS];

static cellkv_status find(const char *devices) {
    return cellkv_devices_of_layers(devices, N_LAYERS, of_layer);
}

static void test_names_and_lists_give_every_layer_a_device(void) {
    static const char *const texts[] = {"CPU",   "cpu",         "CPU,CPU",
                                        "CPU=5", "CPU=4,CPU=1", "CPU,CPU,CPU,CPU,CPU"};
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        memset(of_layer, 0, sizeof of_layer);
        CHECK_OK(find(texts[i]));
        for (int l = 0; l < N_LAYERS; l++) {
            CHECK(of_layer[l] == cpu);
        }
    }
    CHECK_OK(find(NULL));
    for (int l = 0; l < N_LAYERS; l++) {
        CHECK(of_layer[l] == of_layer[0]);
    }
    CHECK(!ck_device_is_remote(of_layer[0]));
}

static void test_malformed_lists_are_refused(void) {
    CHECK_REFUSED(cellkv_devices_of_layers("CPU", N_LAYERS, NULL), CELLKV_ERROR_INVALID_ARGUMENT,
                  "of_layer");
    CHECK_REFUSED(cellkv_devices_of_layers("CPU", 0, of_layer), CELLKV_ERROR_INVALID_ARGUMENT,
                  "n_layers is 0");
    CHECK_REFUSED(find(""), CELLKV_ERROR_INVALID_ARGUMENT, "a name is missing");
    CHECK_REFUSED(find("CPU,"), CELLKV_ERROR_INVALID_ARGUMENT, "a name is missing");
    CHECK_REFUSED(find("=5"), CELLKV_ERROR_INVALID_ARGUMENT, "a name is missing");
    CHECK_REFUSED(find("CPU="), CELLKV_ERROR_INVALID_ARGUMENT, "a number of layers");
    CHECK_REFUSED(find("CPU=0"), CELLKV_ERROR_INVALID_ARGUMENT, "a number of layers");
    CHECK_REFUSED(find("CPU=-5"), CELLKV_ERROR_INVALID_ARGUMENT, "a number of layers");
    CHECK_REFUSED(find("CPU=5x"), CELLKV_ERROR_INVALID_ARGUMENT, "a number of layers");
    CHECK_REFUSED(find("CPU=99999999999999999999"), CELLKV_ERROR_INVALID_ARGUMENT,
                  "a number of layers");
    CHECK_REFUSED(find("CPU=4"), CELLKV_ERROR_INVALID_ARGUMENT, "4 layers; there are 5");
    CHECK_REFUSED(find("CPU=2147483647,CPU=2147483647"), CELLKV_ERROR_INVALID_ARGUMENT,
                  "4294967294 layers; there are 5");
    CHECK_REFUSED(find("CPU=4,CPU"), CELLKV_ERROR_INVALID_ARGUMENT, "for all or for none");
    CHECK_REFUSED(find("CPU,CPU,CPU,CPU,CPU,CPU"), CELLKV_ERROR_INVALID_ARGUMENT, "6 for 5 layers");
    CHECK_REFUSED(find("CPU,CPU,CPU,CPU,CPU,CPU,CPU,CPU,CPU,CPU,CPU,CPU,CPU,CPU,CPU,CPU"),
                  CELLKV_ERROR_INVALID_ARGUMENT, "more devices than one text may name");
    CHECK_REFUSED(find("CPU,GPU9"), CELLKV_ERROR_UNKNOWN_DEVICE, "GPU9; there are: CPU");
}

static void test_a_cache_of_lists_is_a_cache_of_its_layers(void) {
    const cellkv_layer layers[2] = {{.n_kv_heads = 1,
                                     .head_dim_k = 32,
                                     .head_dim_v = 32,
                                     .type_k = CELLKV_TYPE_F16,
                                     .type_v = CELLKV_TYPE_F16},
                                    {.n_kv_heads = 1,
                                     .head_dim_k = 32,
                                     .head_dim_v = 32,
                                     .type_k = CELLKV_TYPE_F16,
                                     .type_v = CELLKV_TYPE_F16}};
    cellkv_cache_config config = cellkv_cache_config_default();
    cellkv_cache *cache = NULL;
    config.n_layers = 2;
    config.layers = layers;
    config.device = "CPU,CPU,CPU";
    CHECK_REFUSED(cellkv_cache_new(&config, &cache), CELLKV_ERROR_INVALID_ARGUMENT,
                  "3 for 2 layers");
    CHECK(cache == NULL);
    config.device = "CPU=1,CPU=1";
    CHECK_OK(cellkv_cache_new(&config, &cache));
    cellkv_cache_free(cache);
}

static void test_metal_attends_over_pairs_of_widths(void) {
    CHECK(ck_metal_attends(64, 64));
    CHECK(ck_metal_attends(192, 128));
    CHECK(ck_metal_attends(576, 512));
    CHECK(!ck_metal_attends(64, 128));
    CHECK(!ck_metal_attends(128, 192));
    CHECK(!ck_metal_attends(576, 576));
    CHECK(!ck_metal_attends(24, 24));
}

/* ---- addresses ---- */

static void *listen_at(int *port) {
    static int fd;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(bind(fd, (struct sockaddr *)&address, sizeof address) == 0 && listen(fd, 1) == 0);
    CHECK(getsockname(fd, (struct sockaddr *)&address, &size) == 0);
    *port = ntohs(address.sin_port);
    return &fd;
}

static bool have_rpc(void) {
    return ggml_backend_reg_by_name("RPC") != NULL;
}

static void test_malformed_addresses_are_refused(void) {
    static const char *const texts[] = {"rpc://",
                                        "rpc://host",
                                        "rpc://:50052",
                                        "rpc://host:",
                                        "rpc://host:0",
                                        "rpc://host:65536",
                                        "rpc://host:1x",
                                        "rpc://host:50052/",
                                        "rpc://host:50052/x",
                                        "rpc://host:50052/-1",
                                        "rpc://[::1]:50052",
                                        "rpc://host: 50052"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        CHECK_REFUSED(find(texts[i]), CELLKV_ERROR_INVALID_ARGUMENT, texts[i]);
    }
    char text[400] = "rpc://";
    memset(text + strlen(text), 'h', 300);
    strcat(text, ":50052");
    CHECK_REFUSED(find(text), CELLKV_ERROR_INVALID_ARGUMENT, "is no address");
}

static void test_an_address_where_nobody_listens_is_refused(void) {
    int port;
    int *fd = listen_at(&port);
    close(*fd);
    char text[64];
    snprintf(text, sizeof text, "rpc://127.0.0.1:%d", port);
    if (have_rpc()) {
        CHECK_REFUSED(find(text), CELLKV_ERROR_NETWORK, text);
        CHECK_REFUSED(find("rpc://host.invalid:50052"), CELLKV_ERROR_NETWORK, "host.invalid");
    } else {
        CHECK_REFUSED(find(text), CELLKV_ERROR_UNSUPPORTED, "built without RPC");
    }
}

/* What a stranger answers to the greeting. */
static const char *answer;

static void *be_a_stranger(void *context) {
    const int client = accept(*(int *)context, NULL, NULL);
    char greeting[33];
    CHECK(recv(client, greeting, sizeof greeting, MSG_WAITALL) == sizeof greeting);
    CHECK(send(client, answer, strlen(answer), 0) == (ssize_t)strlen(answer));
    close(client);
    return NULL;
}

static void test_an_address_where_strangers_answer_is_refused(void) {
    static const char *const answers[] = {"", "220 mail\r\n", "HTTP/1.1 400 Bad Request\r\n\r\n",
                                          "\x1c\0\0\0\0\0\0\0 and no more"};
    for (size_t i = 0; i < sizeof answers / sizeof *answers && have_rpc(); i++) {
        int port;
        int *fd = listen_at(&port);
        pthread_t thread;
        char text[64];
        answer = answers[i];
        CHECK(pthread_create(&thread, NULL, be_a_stranger, fd) == 0);
        snprintf(text, sizeof text, "rpc://127.0.0.1:%d", port);
        CHECK_REFUSED(find(text), CELLKV_ERROR_NETWORK, text);
        pthread_join(thread, NULL);
        close(*fd);
    }
}

/* ---- lending ---- */

static void test_servers_are_refused_what_they_cannot_do(void) {
    cellkv_rpc_server_config config = cellkv_rpc_server_config_default();
    CHECK(strcmp(config.host, "127.0.0.1") == 0);
    CHECK_REFUSED(cellkv_rpc_server_run(NULL), CELLKV_ERROR_INVALID_ARGUMENT, "config");
    config.size--;
    CHECK_REFUSED(cellkv_rpc_server_run(&config), CELLKV_ERROR_INVALID_ARGUMENT, "config.size");
    config = cellkv_rpc_server_config_default();
    config.port = 0;
    CHECK_REFUSED(cellkv_rpc_server_run(&config), CELLKV_ERROR_INVALID_ARGUMENT, "config.port");
    config.port = 65536;
    CHECK_REFUSED(cellkv_rpc_server_run(&config), CELLKV_ERROR_INVALID_ARGUMENT, "config.port");
    config = cellkv_rpc_server_config_default();
    config.n_threads = -1;
    CHECK_REFUSED(cellkv_rpc_server_run(&config), CELLKV_ERROR_INVALID_ARGUMENT, "n_threads");
    config = cellkv_rpc_server_config_default();
    config.host = "localhost";
    CHECK_REFUSED(cellkv_rpc_server_run(&config), CELLKV_ERROR_INVALID_ARGUMENT, "localhost");
    config.host = NULL;
    CHECK_REFUSED(cellkv_rpc_server_run(&config), CELLKV_ERROR_INVALID_ARGUMENT, "config.host");
    config.host = "0.0.0.0";
    CHECK_REFUSED(cellkv_rpc_server_run(&config), CELLKV_ERROR_INVALID_ARGUMENT, "allow_remote");
    config = cellkv_rpc_server_config_default();
    if (!have_rpc()) {
        CHECK_REFUSED(cellkv_rpc_server_run(&config), CELLKV_ERROR_UNSUPPORTED, "without RPC");
        return;
    }
    int *fd = listen_at(&config.port);
    CHECK_REFUSED(cellkv_rpc_server_run(&config), CELLKV_ERROR_NETWORK, "cannot listen");
    close(*fd);
    config.device = "GPU9";
    CHECK_REFUSED(cellkv_rpc_server_run(&config), CELLKV_ERROR_UNKNOWN_DEVICE, "GPU9");
}

int main(void) {
    RUN(test_names_and_lists_give_every_layer_a_device);
    RUN(test_malformed_lists_are_refused);
    RUN(test_a_cache_of_lists_is_a_cache_of_its_layers);
    RUN(test_metal_attends_over_pairs_of_widths);
    RUN(test_malformed_addresses_are_refused);
    RUN(test_an_address_where_nobody_listens_is_refused);
    RUN(test_an_address_where_strangers_answer_is_refused);
    RUN(test_servers_are_refused_what_they_cannot_do);
    return 0;
}
