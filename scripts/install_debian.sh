#!/usr/bin/env bash
# Debian packages without which tests are skipped: Chromium and its driver, for those marked
# `browser`, and the libraries of Mooncake's engine. Needs root and apt-get.
set -euo pipefail
packages=(chromium chromium-driver libibverbs1 libnl-3-200 libnl-route-3-200)
if dpkg --status "${packages[@]}" >/dev/null 2>&1; then
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends "${packages[@]}"
