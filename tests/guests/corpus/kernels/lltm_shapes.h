#pragma once

constexpr double kLltmGates = 3;
