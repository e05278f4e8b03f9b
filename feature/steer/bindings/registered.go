// SPDX-License-Identifier: Apache-2.0

package bindings

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/internal/bounded"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

// A service without configuration is a name with bindings and registered sockets: one for each protocol and family. A
// dual-stack socket also serves IPv4 unless an IPv4 socket is registered. A socket stays registered until it is closed
// or replaced.

// Registration is a socket to register for a service.
type Registration struct {
	Service string
	FD      int // owned by the caller
}

var (
	// ErrSocket means that a socket cannot serve a service.
	ErrSocket = errors.New("socket cannot be registered")
	// ErrConfigured means that the service is in the configuration.
	ErrConfigured = errors.New("a configured service")
)

// socketKind is the traffic that a socket can serve.
type socketKind struct {
	tcp, v6, v4 bool
	local       netip.AddrPort
}

func (k socketKind) kinds() (out []uint32) {
	if k.v4 {
		out = append(out, engine.KindOfPacket(k.tcp, false))
	}
	if k.v6 {
		out = append(out, engine.KindOfPacket(k.tcp, true))
	}
	return out
}

// RegisterSockets registers sockets in a namespace. It returns the kinds ("tcp4", "udp6" …) served by each.
func RegisterSockets(l *kernel.WriteLock, ns *netns.Handle, all []Registration) ([][]string, error) {
	looks := make([]socketKind, len(all))
	for i, r := range all {
		if err := checkLabel(r.Service); err != nil {
			return nil, err
		}
		var err error
		if looks[i], err = inspect(r.FD, ns); err != nil {
			return nil, fmt.Errorf("descriptor %d for service %s: %w", r.FD, r.Service, err)
		}
	}
	var names []string
	for _, r := range all {
		names = append(names, r.Service)
	}
	if err := notConfigured(l.Root, ns, names...); err != nil {
		return nil, err
	}
	d, err := openDispatch(l, ns, engine.FewestBindings)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	served := make([][]string, len(all))
	return served, d.change(func() error {
		for i, r := range all {
			if served[i], err = d.register(r, looks[i]); err != nil {
				return fmt.Errorf("descriptor %d for service %s: %w", r.FD, r.Service, err)
			}
		}
		return nil
	})
}

// notConfigured rejects services with slots.
func notConfigured(r *kernel.Root, ns *netns.Handle, names ...string) error {
	for _, kind := range record.Engines {
		of, unread, err := record.ReadAll(r, record.Scope(ns), kind)
		if err != nil {
			return err
		}
		for _, name := range names {
			if of[name] != nil || unread.Has(record.Instance(record.Scope(ns), name)) {
				return fmt.Errorf("%s is %w with slots: use weir steer admit and withdraw", name, ErrConfigured)
			}
		}
	}
	return nil
}

func (d *dispatch) register(r Registration, look socketKind) (served []string, err error) {
	x, err := d.acquire(r.Service)
	if err != nil {
		return nil, err
	}
	for _, kind := range look.kinds() {
		if look.v6 && kind&2 == 0 && d.Given(x.ID, kind) != 0 && d.Given(x.ID, kind) != d.Given(x.ID, kind|2) {
			continue // an IPv4 socket wins over a dual-stack one
		}
		if err := engine.PutSocket(d.maps("given"), x.ID*engine.KindsIPv4+kind, r.FD); err != nil {
			return nil, fmt.Errorf("%w: %w%s", ErrSocket, err, givenAdvice(err))
		}
		kernel.Step("steer:given")
		served = append(served, KindName(kind))
	}
	return served, nil
}

func givenAdvice(err error) string {
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL) {
		return ": it is not bound, or is closing"
	}
	return ""
}

// inspect returns the traffic that a socket can serve in a namespace.
func inspect(fd int, ns *netns.Handle) (k socketKind, err error) {
	get := func(level, opt int) int {
		v, e := unix.GetsockoptInt(fd, level, opt)
		if err == nil && e != nil {
			err = e
		}
		return v
	}
	domain, proto := get(unix.SOL_SOCKET, unix.SO_DOMAIN), get(unix.SOL_SOCKET, unix.SO_PROTOCOL)
	if err != nil {
		return k, fmt.Errorf("%w: it is not a socket: %w", ErrSocket, err)
	}
	switch domain {
	case unix.AF_INET:
		k.v4 = true
	case unix.AF_INET6:
		k.v6, k.v4 = true, get(unix.IPPROTO_IPV6, unix.IPV6_V6ONLY) == 0
	default:
		return k, fmt.Errorf("%w: it is neither IPv4 nor IPv6", ErrSocket)
	}
	switch proto {
	case unix.IPPROTO_TCP:
		k.tcp = true
		if get(unix.SOL_SOCKET, unix.SO_ACCEPTCONN) == 0 && err == nil {
			return k, fmt.Errorf("%w: it does not listen", ErrSocket)
		}
	case unix.IPPROTO_UDP:
		if _, e := bounded.Getpeername(fd); e == nil {
			return k, fmt.Errorf("%w: it is connected and receives from its peer only", ErrSocket)
		}
	case unix.IPPROTO_MPTCP:
		return k, fmt.Errorf("%w: no program can select an MPTCP listener: listen with plain TCP", ErrSocket)
	default:
		return k, fmt.Errorf("%w: it is neither TCP nor UDP", ErrSocket)
	}
	if err != nil {
		return k, err
	}
	local, err := bounded.Getsockname(fd)
	if err != nil {
		return k, err
	}
	switch a := local.(type) {
	case *unix.SockaddrInet4:
		k.local = netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port))
	case *unix.SockaddrInet6:
		k.local = netip.AddrPortFrom(netip.AddrFrom16(a.Addr), uint16(a.Port))
		if at := k.local.Addr(); !at.IsUnspecified() {
			k.v6, k.v4 = !at.Is4In6(), k.v4 && at.Is4In6()
		}
	}
	if k.local.Port() == 0 {
		return k, fmt.Errorf("%w: it is not bound", ErrSocket)
	}
	if err := ns.Do(func() error { return service.Narrow(fd) }); err != nil {
		return k, fmt.Errorf("%w: %w", ErrSocket, err)
	}
	return k, inNamespace(fd, ns)
}

// inNamespace checks a socket's network namespace.
func inNamespace(fd int, ns *netns.Handle) error {
	const siocGSkNs = 0x894c // linux/sockios.h
	at, err := unix.IoctlRetInt(fd, siocGSkNs)
	if err != nil {
		return fmt.Errorf("read its network namespace: %w", err)
	}
	defer unix.Close(at)
	var st unix.Stat_t
	if err := unix.Fstat(at, &st); err != nil {
		return err
	}
	if st.Ino != ns.Inode() {
		return fmt.Errorf("%w: it is in another network namespace (net:[%d]) than %s: select it with --netns", ErrSocket, st.Ino, ns)
	}
	return nil
}

// RegisterWithin repeats RegisterMember until it succeeds, fails permanently, or wait has passed.
func RegisterWithin(ctx context.Context, r *kernel.Root, name, ref string, m service.Member, at service.Listen, wait time.Duration) (served []string, err error) {
	err = engine.Within(ctx, wait, func() (err error) { served, err = RegisterMember(ctx, r, name, ref, m, at); return err })
	return served, err
}

// RegisterMember registers the socket of a process bound to a listen. The namespace is ref, or the process's if ref is
// empty.
func RegisterMember(ctx context.Context, r *kernel.Root, name, ref string, m service.Member, at service.Listen) ([]string, error) {
	m.Group = true // any socket of a reuseport group will do: the group chooses
	spec := service.Spec{Name: name, Listen: []service.Listen{at}, Netns: ref, Members: []service.Member{m}}
	ns, _, err := spec.FindNetns(ctx)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	if err := notConfigured(r, ns, name); err != nil {
		return nil, err // before waiting for a socket
	}
	l, err := r.Lock(ctx)
	if err != nil {
		return nil, err
	}
	defer l.Unlock()
	a, err := m.Adopt(ctx, ns, spec)
	if err != nil {
		return nil, err
	}
	defer a.Close()
	var all []Registration
	var fds []int
	for _, s := range a.Sockets {
		if !slices.Contains(fds, s.FD) { // a dual-stack socket has two endpoints
			fds = append(fds, s.FD)
			all = append(all, Registration{name, s.FD})
		}
	}
	served, err := RegisterSockets(l, ns, all)
	return slices.Concat(served...), err
}

// listenFDsStart is SD_LISTEN_FDS_START.
const listenFDsStart = 3

// RegisterPassed registers the sockets passed to this process like by systemd (sd_listen_fds(3)).
func RegisterPassed(l *kernel.WriteLock, ns *netns.Handle, name string) ([]string, error) {
	if err := notConfigured(l.Root, ns, name); err != nil {
		return nil, err
	}
	all, err := passedSockets(ns, name)
	if err != nil {
		return nil, err
	}
	served, err := RegisterSockets(l, ns, all)
	return slices.Concat(served...), err
}

// passedSockets returns the passed sockets. Of a reuseport group it returns only the first, because the group chooses
// among its sockets.
func passedSockets(ns *netns.Handle, name string) ([]Registration, error) {
	n, err := strconv.Atoi(os.Getenv("LISTEN_FDS"))
	if err != nil || n < 1 {
		return nil, fmt.Errorf("%w: none was passed (LISTEN_FDS=%q): run this from a unit with socket activation, or name its process with --pid, --pidfile, --unit or --cgroup, and protocol, address and port", ErrSocket, os.Getenv("LISTEN_FDS"))
	}
	if pid := os.Getenv("LISTEN_PID"); pid != "" && pid != strconv.Itoa(os.Getpid()) {
		return nil, fmt.Errorf("%w: the sockets of LISTEN_FDS are for process %s, not for process %d", ErrSocket, pid, os.Getpid())
	}
	var out []Registration
	taken := map[uint32]netip.AddrPort{}
	for fd := listenFDsStart; fd < listenFDsStart+n; fd++ {
		look, err := inspect(fd, ns)
		if err != nil {
			return nil, fmt.Errorf("descriptor %d: %w", fd, err)
		}
		shares, _ := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT)
		again := false
		for _, kind := range look.kinds() {
			if at, ok := taken[kind]; ok && (at != look.local || shares == 0) {
				return nil, fmt.Errorf("descriptor %d: %w: another socket already serves %s: register them under two names", fd, ErrSocket, KindName(kind))
			} else if ok {
				again = true
			}
			taken[kind] = look.local
		}
		if !again {
			out = append(out, Registration{name, fd})
		}
	}
	return out, nil
}

// UnregisterSockets removes a service's sockets of some kinds ("tcp4" …), or all. The service's traffic is rejected
// until others are registered. It returns the removed kinds.
func UnregisterSockets(l *kernel.WriteLock, ns *netns.Handle, name string, only ...string) (were []string, err error) {
	if err := notConfigured(l.Root, ns, name); err != nil {
		return nil, err
	}
	none := fmt.Errorf("service %s has no registered socket in namespace %s: %w", name, ns, kernel.ErrNotExist)
	d, err := openDispatchThere(l, ns)
	if errors.Is(err, kernel.ErrNotExist) {
		return nil, none
	} else if err != nil {
		return nil, err
	}
	defer d.Close()
	x, ok, err := d.labels.Get(name)
	if err != nil {
		return nil, err
	}
	if !ok {
		return nil, none
	}
	for kind := range uint32(engine.KindsIPv4) {
		if len(only) > 0 && !slices.Contains(only, KindName(kind)) || d.Given(x.ID, kind) == 0 {
			continue
		}
		if err := d.maps("given").Delete(x.ID*engine.KindsIPv4 + kind); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) && !errors.Is(err, unix.EINVAL) {
			return were, err
		}
		kernel.Step("steer:taken")
		were = append(were, KindName(kind))
	}
	if len(were) == 0 {
		return nil, none
	}
	if x.Bindings == 0 && !d.HasSocket(x.ID) {
		if err := d.labels.Forget(name); err != nil {
			return were, err
		}
	}
	return were, d.removeIdle()
}
