#pragma once
// How an operator refuses a call.

#include <sstream>
#include <stdexcept>

namespace tiled_attention {

// Raises RuntimeError in Python.
template <class... Parts>
[[noreturn, gnu::noinline, gnu::cold]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

}  // namespace tiled_attention
