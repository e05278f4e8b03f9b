// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/reroute/liveness/bpf"
	"github.com/weir-project/weir/internal/dump"
	"github.com/weir-project/weir/internal/ethtool"
	"github.com/weir-project/weir/kernel"
)

// A loop is a veth pair. Packets enter at its first end, where a token bucket passes one per tick. They leave at its
// second end, where the program is attached.
func entryName(loop int) string { return fmt.Sprintf("weir-tick%d", loop) }
func exitName(loop int) string  { return fmt.Sprintf("weir-tock%d", loop) }

const frameBytes = int(unsafe.Sizeof(bpf.LivenessLivenessFrame{})) - 2

// frameMagic is LIVENESS_MAGIC.
const frameMagic = 0x52494557

// loop is a loop of a tick source with its device indexes.
type loop struct {
	cpu         int
	entry, exit int
}

// tick returns the tick of the loops: the shortest one needed by a session, and at most 10 ms to notice stalls.
func (c Config) tick() time.Duration {
	tick := maxTick
	if c.Tick != 0 {
		tick = c.Tick
	}
	for _, s := range c.Sessions {
		tick = min(tick, s.tick())
	}
	// Half the tick fits intervals not divisible by it. It also spreads the probes of many sessions.
	uneven := func(s Session) bool { return s.Interval%tick != 0 }
	if c.Tick == 0 && (len(c.Sessions) > maxBurst || slices.ContainsFunc(c.Sessions, uneven)) {
		tick /= 2
	}
	return tick
}

// tick returns the session's longest usable tick, one interval. Longer sleeps save CPU time, because a wakeup costs
// more than its work. Timers find verdicts between two ticks (verdict.h). A stalled CPU must be recognized (after a
// tick and LIVENESS_LATE) before its silence leads to a verdict (2.3 intervals). The shortest intervals need two
// ticks for this.
func (s Session) tick() time.Duration {
	if s.Interval < 2*time.Millisecond {
		return s.Interval / 2
	}
	return s.Interval
}

// maxBurst is the limit of probes in one tick: veth queues and simple network cards hold 256 packets.
const maxBurst = 256

const (
	minTick = minInterval / 4 // for BFD sessions
	maxTick = 10 * time.Millisecond
)

// onlineCPUs returns the CPUs able to run a loop.
func onlineCPUs() ([]int, error) {
	text, err := os.ReadFile("/sys/devices/system/cpu/online")
	if err != nil {
		return nil, err
	}
	var all []int
	for part := range strings.SplitSeq(strings.TrimSpace(string(text)), ",") {
		first, last, isRange := strings.Cut(part, "-")
		if !isRange {
			last = first
		}
		a, err := strconv.Atoi(first)
		if err != nil {
			return nil, fmt.Errorf("CPUs online: %q", text)
		}
		b, err := strconv.Atoi(last)
		if err != nil {
			return nil, fmt.Errorf("CPUs online: %q", text)
		}
		for ; a <= b; a++ {
			all = append(all, a)
		}
	}
	return all, nil
}

// loopCPUs returns the CPUs with a loop.
func loopCPUs(want []int) ([]int, error) {
	online, err := onlineCPUs()
	if err != nil {
		return nil, err
	}
	for _, cpu := range want {
		if !slices.Contains(online, cpu) {
			return nil, fmt.Errorf("cpus: CPU %d is not online: %v are", cpu, online)
		}
	}
	if len(want) > 0 {
		return want, nil
	}
	return online[:min(len(online), maxLoops)], nil
}

// makeLoops creates missing loop devices and removes surplus ones, in the calling thread's network namespace.
func makeLoops(cpus []int, tick time.Duration) ([]loop, error) {
	var out []loop
	for i, cpu := range cpus {
		l, err := makeLoop(i, cpu, tick)
		if err != nil {
			return nil, fmt.Errorf("loop of CPU %d: %w", cpu, err)
		}
		out = append(out, l)
	}
	return out, removeLoops(len(cpus))
}

func makeLoop(i, cpu int, tick time.Duration) (l loop, err error) {
	entry, err := netlink.LinkByName(entryName(i))
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		entry, err = addLoop(i)
	}
	if err != nil {
		return l, err
	}
	exit, err := netlink.LinkByName(exitName(i))
	if err != nil {
		return l, err
	}
	if err := clock(entry.Attrs().Index, tick); err != nil {
		return l, err
	}
	return loop{cpu: cpu, entry: entry.Attrs().Index, exit: exit.Attrs().Index}, nil
}

// addLoop creates the pair. It carries only the loop's packet: no addresses, no neighbour discovery. NAPI gives it
// its own queue in place of the CPU's backlog (GRO on one side, no TSO on the other: drivers/net/veth.c). A flood
// then cannot crowd out the packet.
func addLoop(i int) (netlink.Link, error) {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.TxQLen = entryName(i), 16
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: exitName(i)}); err != nil {
		return nil, fmt.Errorf("creating the devices %s and %s: %w", entryName(i), exitName(i), err)
	}
	for _, name := range []string{entryName(i), exitName(i)} {
		// The first end is the device of segment routes. It therefore needs IPv6, but no address.
		variable := "disable_ipv6"
		if name == entryName(i) {
			variable = "addr_gen_mode"
		}
		if err := os.WriteFile("/proc/sys/net/ipv6/conf/"+name+"/"+variable, []byte("1"), 0); err != nil {
			return nil, fmt.Errorf("disabling IPv6 addresses of %s: %w", name, err)
		}
		l, err := netlink.LinkByName(name)
		if err != nil {
			return nil, err
		}
		if err := errors.Join(netlink.LinkSetARPOff(l), ethtool.Set(name, unix.ETHTOOL_STSO, false), ethtool.Set(name, unix.ETHTOOL_SGRO, true)); err != nil {
			return nil, fmt.Errorf("configuring %s: %w", name, err)
		}
		if err := netlink.LinkSetUp(l); err != nil {
			return nil, fmt.Errorf("setting %s up: %w", name, err)
		}
	}
	return netlink.LinkByName(entryName(i))
}

// psTick is the unit of a token bucket's depth: 64 ns (PSCHED_SHIFT, include/net/pkt_sched.h).
const psTick = 64

// clock sets a token bucket passing one packet per tick.
func clock(ifindex int, tick time.Duration) error {
	rate := uint64(frameBytes) * uint64(time.Second) / uint64(tick)
	q := &netlink.Tbf{Rate: rate, Limit: uint32(8 * frameBytes), Buffer: uint32((tick + tick/8) / psTick),
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: ifindex, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT}}
	have, err := dump.QdiscList(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Index: ifindex}})
	if err != nil {
		return fmt.Errorf("listing queues: %w", err)
	}
	for _, h := range have {
		if t, ok := h.(*netlink.Tbf); ok && t.Rate == q.Rate && t.Buffer == q.Buffer && t.Limit == q.Limit {
			return nil
		}
	}
	if err := netlink.QdiscReplace(q); err != nil {
		return fmt.Errorf("setting the token bucket: %w", err)
	}
	return nil
}

// removeLoops removes all loops from a number on.
func removeLoops(from int) error {
	var errs []error
	for i := from; i < maxLoops; i++ {
		l, err := netlink.LinkByName(entryName(i))
		if errors.As(err, &netlink.LinkNotFoundError{}) {
			continue
		}
		if err == nil {
			err = netlink.LinkDel(l)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// seed sends a packet into a loop, on its CPU. The packet stays on this CPU.
func seed(l loop, number int, generation uint32) error {
	var set unix.CPUSet
	set.Set(l.cpu)
	done := make(chan error, 1)
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("seeding a loop: %w", err)
	}
	defer unix.Close(fd)
	frame := make([]byte, frameBytes)
	binary.BigEndian.PutUint16(frame[12:], unix.ETH_P_IPV6)
	for i, w := range []uint32{frameMagic, uint32(number), generation} {
		binary.NativeEndian.PutUint32(frame[14+4*i:], w)
	}
	go func() { done <- sendOn(fd, &set, frame, l.entry) }()
	if err := <-done; err != nil {
		return fmt.Errorf("seeding the loop of CPU %d: %w", l.cpu, err)
	}
	return nil
}

// retune starts missing loops. A loop that is silent or on a wrong CPU gets a packet of a new generation.
func retune(clockwork, beats *ebpf.Map, loops []loop, all bool) error {
	var m bpf.LivenessLivenessTickSource
	if err := clockwork.Lookup(uint32(0), &m); err != nil {
		return fmt.Errorf("reading the tick source: %w", err)
	}
	for i, l := range loops {
		var b bpf.LivenessLivenessBeat
		if err := beats.Lookup(uint32(i), &b); err != nil {
			return fmt.Errorf("reading the timer loops: %w", err)
		}
		dead := time.Duration(kernel.Monotonic()-b.Beat) > max(100*time.Millisecond, 8*time.Duration(m.Tick))
		if !all && !dead && int(b.Cpu) == l.cpu {
			continue
		}
		m.Generation[i]++
		if err := clockwork.Put(uint32(0), m); err != nil {
			return fmt.Errorf("starting a loop: %w", err)
		}
		if !dead {
			// The queue's timer stays on its CPU while a packet waits, so the old packet must have ended.
			time.Sleep(3*time.Duration(m.Tick) + time.Millisecond)
		}
		if err := seed(l, i, m.Generation[i]); err != nil {
			return err
		}
	}
	return nil
}

// sendOn sends from a CPU, on a thread ending with it.
func sendOn(fd int, cpu *unix.CPUSet, frame []byte, ifindex int) error {
	runtime.LockOSThread() // never unlocked: the thread is bound to a CPU and must not run other goroutines
	if err := unix.SchedSetaffinity(0, cpu); err != nil {
		return err
	}
	return unix.Sendto(fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: ifindex, Protocol: 0xdd86})
}
