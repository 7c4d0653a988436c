// gloo's ibverbs transport for forks.py, which has no C++: two connected pairs in one process.
#include <gloo/transport/ibverbs/device.h>

#include <cstdio>
#include <memory>

#include <gloo/transport/buffer.h>
#include <gloo/transport/context.h>
#include <gloo/transport/pair.h>

using namespace gloo::transport;

static std::shared_ptr<Device> device;
static std::shared_ptr<Context> contexts[2];
static std::unique_ptr<Buffer> near, far;

template <typename F> static int told(F function) {
  try {
    function();
    return 0;
  } catch (const std::exception &error) {
    fprintf(stderr, "gloo: %s\n", error.what());
    return -1;
  }
}

extern "C" int field_connect(const char *name, int port, int index, void *source, size_t length,
                             void *target, size_t there) {
  return told([=] {
    device = ibverbs::CreateDevice({name, port, index});
    std::vector<char> addresses[2];
    for (int rank = 0; rank < 2; rank++) {
      contexts[rank] = device->createContext(rank, 2);
      addresses[rank] = contexts[rank]->createPair(!rank)->address().bytes();
    }
    for (int rank = 0; rank < 2; rank++)
      contexts[rank]->getPair(!rank)->connect(addresses[!rank]);
    far = contexts[1]->getPair(0)->createRecvBuffer(0, target, there);
    near = contexts[0]->getPair(1)->createSendBuffer(0, source, length);
  });
}

extern "C" int field_write(size_t length) {
  return told([=] {
    near->send(0, length);
    near->waitSend();
    far->waitRecv();
  });
}
