// A stand-in for the CUDA driver: what the probe calls, with devices and misbehaviour by environment variables.
//   STANDIN_DEVICES   how many devices (default 1); device i has 16 GiB * (i + 1)
//   STANDIN_FAIL      a call that fails: NAME, or NAME:DEVICE
//   STANDIN_HANG, STANDIN_CRASH, STANDIN_ABORT, STANDIN_NOISE    a call in which it does that; "load": when it is loaded
//   STANDIN_INTEGRATED   the number of a device that is part of the processor
//   STANDIN_ODD       cuMemGetInfo gives more free bytes than there are
//   STANDIN_LOG       a file that every call is appended to
// CUDA_VISIBLE_DEVICES chooses and orders devices, as the driver does it.
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MOST 64
enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_CONTEXT = 201 };

static int shown[MOST], n_shown, retained[MOST], current = -1;

static int is(const char *variable, const char *call) {
  const char *value = getenv(variable);
  return value && !strcmp(value, call);
}

// What goes wrong in `call`, of `device` if it is not negative.
static int wrong(const char *call, int device) {
  char exact[64];
  snprintf(exact, sizeof exact, "%s:%d", call, device);
  const char *log = getenv("STANDIN_LOG");
  if (log) {
    int fd = open(log, O_WRONLY | O_CREAT | O_APPEND, 0600);
    dprintf(fd, "%s\n", exact);
    if (!strcmp(call, "load")) dprintf(fd, "pid:%d\n", (int)getpid());
    close(fd);
  }
  if (is("STANDIN_NOISE", call)) { printf("{\"devices\": 7}\nnoise\n"); fflush(stdout); }
  if (is("STANDIN_HANG", call)) { for (;;) pause(); }
  if (is("STANDIN_CRASH", call)) *(volatile int *)8 = 0;
  if (is("STANDIN_ABORT", call)) { fprintf(stderr, "driver: assertion failed\n"); abort(); }
  return is("STANDIN_FAIL", call) || is("STANDIN_FAIL", exact) ? OUT_OF_MEMORY : OK;
}

__attribute__((constructor)) static void loaded(void) { wrong("load", -1); }

int cuInit(unsigned flags) {
  const char *count = getenv("STANDIN_DEVICES"), *visible = getenv("CUDA_VISIBLE_DEVICES");
  int n = count ? atoi(count) : 1;
  for (const char *at = visible; visible && *at;) {
    char *end;
    long i = strtol(at, &end, 10);
    if (end == at || i < 0 || i >= n || n_shown == MOST) break;
    shown[n_shown++] = i;
    at = *end == ',' ? end + 1 : end;
  }
  for (int i = 0; !visible && i < n && i < MOST; i++) shown[n_shown++] = i;
  int error = wrong("cuInit", -1);
  return error ? error : n_shown ? OK : NO_DEVICE;
}

int cuDriverGetVersion(int *version) {
  *version = 12080;
  return wrong("cuDriverGetVersion", -1);
}

int cuDeviceGetCount(int *count) {
  const char *devices = getenv("STANDIN_DEVICES");
  *count = devices && atoi(devices) > MOST ? atoi(devices) : n_shown;
  return wrong("cuDeviceGetCount", -1);
}

int cuDeviceGet(int *device, int ordinal) {
  if (ordinal < 0 || ordinal >= n_shown) return INVALID_DEVICE;
  *device = shown[ordinal];
  return wrong("cuDeviceGet", *device);
}

int cuDeviceGetName(char *name, int len, int device) {
  snprintf(name, len, "Stand-in \033[31m%d", device);
  return wrong("cuDeviceGetName", device);
}

int cuDeviceGetPCIBusId(char *id, int len, int device) {
  snprintf(id, len, "0000:%02X:00.0", 0xa0 + device);
  return wrong("cuDeviceGetPCIBusId", device);
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
  const char *integrated = getenv("STANDIN_INTEGRATED");
  if (attribute != 18) return INVALID_VALUE; // CU_DEVICE_ATTRIBUTE_INTEGRATED
  *value = integrated && atoi(integrated) == device;
  return wrong("cuDeviceGetAttribute", device);
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
  int error = wrong("cuDevicePrimaryCtxRetain", device);
  if (!error) { retained[device]++; *context = &retained[device]; }
  return error;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
  if (retained[device]-- <= 0) return INVALID_CONTEXT;
  return wrong("cuDevicePrimaryCtxRelease_v2", device);
}

int cuCtxSetCurrent(void *context) {
  int device = (int *)context - retained;
  int error = wrong("cuCtxSetCurrent", device);
  if (!error) current = device;
  return error;
}

// A context takes 512 MiB, on its own device.
int cuMemGetInfo_v2(size_t *free, size_t *total) {
  if (current < 0 || !retained[current]) return INVALID_CONTEXT;
  *total = (size_t)(current + 1) << 34;
  *free = *total - ((size_t)retained[current] << 29) + (getenv("STANDIN_ODD") ? (size_t)1 << 40 : 0);
  return wrong("cuMemGetInfo_v2", current);
}

int cuGetErrorName(int error, const char **name) {
  *name = error == NO_DEVICE ? "CUDA_ERROR_NO_DEVICE" : error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR";
  return OK;
}

int cuGetErrorString(int error, const char **text) {
  *text = error == NO_DEVICE ? "no CUDA-capable device is detected" : error == OUT_OF_MEMORY ? "out of memory" : "error";
  return OK;
}
