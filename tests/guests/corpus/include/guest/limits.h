#pragma once

namespace guest {
constexpr double kMost = 6;
}
