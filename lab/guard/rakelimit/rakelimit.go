// SPDX-License-Identifier: Apache-2.0

package rakelimit

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/guard/scenario"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/lab/guard/rakelimit/bpf"
)

// Need reports whether this kernel can run a [Limiter]; [Attach] needs less.
func Need() error {
	err := features.HaveProgramHelper(ebpf.SocketFilter, asm.FnLoop)
	if errors.Is(err, ebpf.ErrNotSupported) {
		return fmt.Errorf("this kernel has no bpf_loop (Linux 5.17), needed to compare many packets at once: %w", err)
	}
	return err
}

// Options are the options of a Limiter.
type Options struct {
	Limit uint32 // packets per second; 0 passes all
	IPv6  bool   // family of the packets' frames
	Seed  uint64 // of the random numbers; they decide the passing packets of an excessive rate
}

// Limiter decides batches of packets with given times. It runs the same program as Attach.
type Limiter struct {
	options Options
	c       *kernel.Collection
	control *ebpf.Memory
	batch   *ebpf.Memory
	entries []bpf.RakeEntry
	frame   []byte
}

const (
	batchSize = 4096 // packets of one run
	levels    = 5
)

// load loads programs with their constants.
func load(limit uint32, injected bool, programs ...string) (*kernel.Collection, error) {
	spec, err := bpf.LoadRake()
	if err != nil {
		return nil, err
	}
	flag := uint32(0)
	if injected {
		flag = 1
	}
	for name, v := range map[string]uint32{"limit": limit, "injected": flag} {
		if err := spec.Variables[name].Set(v); err != nil {
			return nil, fmt.Errorf("set %s: %w", name, err)
		}
	}
	return kernel.Load(spec, programs, nil)
}

// New loads a limiter without history.
func New(o Options) (*Limiter, error) {
	c, err := load(o.Limit, true, "rake_batch", "rake_batch_empty", "rake_ipv4", "rake_ipv6", "rake_empty")
	if err != nil {
		return nil, err
	}
	l := &Limiter{options: o, c: c, entries: make([]bpf.RakeEntry, batchSize), frame: frame(o.IPv6)}
	if l.control, err = c.Maps["control"].Memory(); err == nil {
		l.batch, err = c.Maps["batch"].Memory()
	}
	if err == nil {
		// The generator would remain at 0.
		err = l.set(bpf.RakeControl{Random: o.Seed*2 + 1})
	}
	if err != nil {
		c.Close()
		return nil, fmt.Errorf("map rakelimit's maps into memory: %w", err)
	}
	return l, nil
}

// Close frees the objects loaded by New.
func (l *Limiter) Close() error {
	l.c.Close()
	return nil
}

func (l *Limiter) set(c bpf.RakeControl) error {
	_, err := l.control.WriteAt(rawBytes(&c), 0)
	return err
}

func (l *Limiter) get() (c bpf.RakeControl, err error) {
	_, err = l.control.ReadAt(rawBytes(&c), 0)
	return c, err
}

func rawBytes[T any](v *T) []byte { return unsafe.Slice((*byte)(unsafe.Pointer(v)), unsafe.Sizeof(*v)) }

func bytesOfAll(e []bpf.RakeEntry) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(&e[0])), len(e)*int(unsafe.Sizeof(e[0])))
}

// Decide implements scenario.Limiter.
func (l *Limiter) Decide(packets []scenario.Packet, verdicts []bool) error {
	for len(packets) > 0 {
		n := min(batchSize, len(packets))
		if err := l.decide(packets[:n], verdicts[:n], nil); err != nil {
			return err
		}
		packets, verdicts = packets[n:], verdicts[n:]
	}
	return nil
}

// decide decides one batch, and returns the deciding levels if levels is not nil.
func (l *Limiter) decide(packets []scenario.Packet, verdicts []bool, levels []int) error {
	entries := l.entries[:len(packets)]
	for i := range packets {
		p := &packets[i]
		e := bpf.RakeEntry{At: p.At, Port: p.SrcPort}
		if l.options.IPv6 {
			e.Ipv6, e.Source = 1, p.Src.IPv6()
		} else {
			a := p.Src.IPv4()
			copy(e.Source[:], a[:])
		}
		entries[i] = e
	}
	if _, err := l.batch.WriteAt(bytesOfAll(entries), 0); err != nil {
		return err
	}
	if _, err := l.control.WriteAt(rawBytes(new(uint32(len(entries)))), int64(unsafe.Offsetof(bpf.RakeControl{}.Count))); err != nil {
		return err
	}
	done, err := l.c.Programs["rake_batch"].Run(&ebpf.RunOptions{Data: l.frame})
	if err != nil {
		return fmt.Errorf("run rakelimit over %d packets: %w", len(entries), err)
	}
	if int(done) != len(entries) {
		return fmt.Errorf("rakelimit decided %d packets, want %d", done, len(entries))
	}
	if _, err := l.batch.ReadAt(bytesOfAll(entries), 0); err != nil {
		return err
	}
	for i := range entries {
		verdicts[i] = entries[i].Passed != 0
		if levels != nil {
			levels[i] = int(entries[i].Level)
		}
	}
	return nil
}

// One decides one packet by the socket filter itself, and returns the level of the excessive rate (5:
// none). Its clock and its random numbers are shared with Decide.
func (l *Limiter) One(p *scenario.Packet) (passed bool, level int, err error) {
	if _, err := l.control.WriteAt(rawBytes(&p.At), 0); err != nil {
		return false, 0, err
	}
	verdict, err := l.Program().Run(&ebpf.RunOptions{Data: l.Frame(p)})
	if err != nil {
		return false, 0, fmt.Errorf("run rakelimit: %w", err)
	}
	c, err := l.get()
	return verdict != 0, int(c.Level), err
}

// Program returns the socket filter run by One.
func (l *Limiter) Program() *ebpf.Program {
	if l.options.IPv6 {
		return l.c.Programs["rake_ipv6"]
	}
	return l.c.Programs["rake_ipv4"]
}

// BatchProgram returns the program run by Decide.
func (l *Limiter) BatchProgram() *ebpf.Program { return l.c.Programs["rake_batch"] }

// Empty returns a socket filter without work, and EmptyBatch a program passing all packets of the last
// decided batch. Both measure the fixed cost of a run.
func (l *Limiter) Empty() *ebpf.Program      { return l.c.Programs["rake_empty"] }
func (l *Limiter) EmptyBatch() *ebpf.Program { return l.c.Programs["rake_batch_empty"] }

// Offsets of a frame's fields.
const (
	ethernet = 14
	source4  = ethernet + 12
	source6  = ethernet + 8
	ports4   = ethernet + 20
	ports6   = ethernet + 40
)

// frame returns a datagram of four bytes to the common destination of a batch. BPF_PROG_TEST_RUN removes
// the Ethernet header.
func frame(ipv6 bool) []byte {
	b := make([]byte, ports6+8+4)
	udp := ports6
	if ipv6 {
		b[12], b[13] = 0x86, 0xdd
		b[ethernet], b[ethernet+5], b[ethernet+6], b[ethernet+7] = 0x60, 12, unix.IPPROTO_UDP, 64
		b[source6+16], b[source6+31] = 0xfd, 2
	} else {
		b = b[:ports4+8+4]
		udp = ports4
		b[12] = 0x08
		b[ethernet], b[ethernet+3], b[ethernet+8], b[ethernet+9] = 0x45, 32, 64, unix.IPPROTO_UDP
		copy(b[source4+4:], []byte{10, 77, 0, 2})
	}
	binary.BigEndian.PutUint16(b[udp+2:], 443)
	binary.BigEndian.PutUint16(b[udp+4:], 12)
	return b
}

// Frame returns a packet as input of Program, an Ethernet frame; valid until the next call.
func (l *Limiter) Frame(p *scenario.Packet) []byte {
	at, udp := source4, ports4
	if l.options.IPv6 {
		at, udp = source6, ports6
	}
	copy(l.frame[at:], p.Src.Addr(l.options.IPv6).AsSlice())
	binary.BigEndian.PutUint16(l.frame[udp:], p.SrcPort)
	binary.NativeEndian.PutUint32(l.frame[udp+8:], p.Payload)
	return l.frame
}

// Dropped returns the dropped packets, as counted by the programs.
func (l *Limiter) Dropped() (total uint64, err error) {
	for level := range uint32(levels) {
		var n uint64
		if err := l.c.Maps["drops"].Lookup(level, &n); err != nil {
			return 0, fmt.Errorf("read rakelimit's drops at level %d: %w", level, err)
		}
		total += n
	}
	return total, nil
}

// Attach limits a socket to limit packets per second of any one party, like the original, until the socket
// closes. It replaces any other filter of the socket.
func Attach(conn *net.UDPConn, limit uint32) error {
	name := "rake_ipv4"
	if local, ok := conn.LocalAddr().(*net.UDPAddr); ok && local.IP.To4() == nil {
		name = "rake_ipv6"
	}
	c, err := load(limit, false, name)
	if err != nil {
		return err
	}
	defer c.Close() // the socket holds the program
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var attached error
	err = raw.Control(func(fd uintptr) {
		attached = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_BPF, c.Programs[name].FD())
	})
	if err = errors.Join(err, attached); err != nil {
		return fmt.Errorf("attach rakelimit to a socket: %w", err)
	}
	return nil
}
