// SPDX-License-Identifier: Apache-2.0

package routers

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// sink is a collector. It counts IPFIX records by source and epoch, and BMP messages.
type sink struct {
	mu        sync.Mutex
	records   map[netip.Addr]map[uint32]int
	follows   map[netip.Addr]map[uint32]uint32 // next sequence number after each received one
	sessions  map[netip.Addr]int               // BMP connections
	routes    map[netip.Addr]int
	templates map[netip.Addr]int // announcements of templates
	conns     []net.Conn
}

func startSink(t *testing.T) (*sink, netip.AddrPort) {
	t.Helper()
	s := &sink{records: map[netip.Addr]map[uint32]int{}, follows: map[netip.Addr]map[uint32]uint32{}, sessions: map[netip.Addr]int{}, routes: map[netip.Addr]int{}, templates: map[netip.Addr]int{}}
	udp, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	// A sink without CPU for seconds must not lose datagrams.
	raw, err := udp.SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) { _ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20) })
	}
	if err != nil {
		t.Fatal(err)
	}
	at := udp.LocalAddr().(*net.UDPAddr).AddrPort()
	tcp, err := net.ListenTCP("tcp4", net.TCPAddrFromAddrPort(at))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { udp.Close(); tcp.Close() })
	go s.readUDP(udp)
	go func() {
		for {
			c, err := tcp.Accept()
			if err != nil {
				return
			}
			go s.readTCP(c)
		}
	}()
	return s, at
}

func (s *sink) readUDP(c *net.UDPConn) {
	buf := make([]byte, 2000)
	for {
		n, from, err := c.ReadFromUDPAddrPort(buf)
		if err != nil {
			return
		}
		s.mu.Lock()
		seq := be.Uint32(buf[8:])
		first := seq
		set := buf[16:n]
		for len(set) > 0 {
			id, size := be.Uint16(set), int(be.Uint16(set[2:]))
			if id == 2 {
				s.templates[from.Addr()]++
			}
			const record = 8 + 2*2 + 1 + 4*8 + 2*4
			for r := set[4:size]; id == template4 && len(r) >= record; r = r[record:] {
				epoch := be.Uint32(r[record-8:])
				if s.records[from.Addr()] == nil {
					s.records[from.Addr()] = map[uint32]int{}
				}
				s.records[from.Addr()][epoch]++
				seq++
			}
			set = set[size:]
		}
		if s.follows[from.Addr()] == nil {
			s.follows[from.Addr()] = map[uint32]uint32{}
		}
		s.follows[from.Addr()][first] = seq
		s.mu.Unlock()
	}
}

func (s *sink) readTCP(c net.Conn) {
	defer c.Close()
	from := c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap()
	s.mu.Lock()
	s.sessions[from]++
	s.conns = append(s.conns, c)
	s.mu.Unlock()
	var head [6]byte
	for {
		if _, err := io.ReadFull(c, head[:]); err != nil {
			return
		}
		if _, err := io.CopyN(io.Discard, c, int64(be.Uint32(head[1:]))-6); err != nil {
			return
		}
		if head[5] == bmpRouteMonitoring {
			s.mu.Lock()
			s.routes[from]++
			s.mu.Unlock()
		}
	}
}

const devices = 16

func startFleet(t *testing.T, to netip.AddrPort, notice func(Event)) *Fleet {
	t.Helper()
	return startSparse(t, to, 0, notice)
}

func startSparse(t *testing.T, to netip.AddrPort, sparse int, notice func(Event)) *Fleet {
	t.Helper()
	return startWith(t, Config{To4: to, Sparse: sparse, Notice: notice})
}

// startWith starts a fleet; missing settings get defaults.
func startWith(t *testing.T, cfg Config) *Fleet {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("need: root")
	}
	ns, err := netns.Current()
	if err != nil {
		t.Fatal(err)
	}
	cfg.Devices, cfg.First4, cfg.First6 = devices, netip.MustParseAddr("127.0.1.1"), netip.IPv6Loopback()
	cfg.Rate, cfg.Records, cfg.Refresh, cfg.Retry, cfg.NS = 50, 3, 20, 50*time.Millisecond, ns
	f, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	f.Start(t.Context())
	t.Cleanup(func() { f.Stop(); ns.Close() })
	return f
}

// Sent is final for an ended epoch and equals the arrivals, to the record.
func TestEpochs(t *testing.T) {
	s, at := startSink(t)
	f := startFleet(t, at, func(e Event) { t.Errorf("%s of %s: %v", e.Kind, e.Device.Addr, e.Err) })
	for range 3 {
		// Each sends some messages, and the epoch ends while they send.
		for i, d := range f.Devices {
			nstest.Until(t, fmt.Sprintf("%s sends in epoch %d", d.Addr, f.Epoch()), func() bool { return f.Sent(IPFIX, i, f.Epoch()) >= 5*3 })
		}
		epoch := f.Advance()
		for i, d := range f.Devices {
			sent := f.Sent(IPFIX, i, epoch)
			nstest.Until(t, "all records arrived", func() bool {
				s.mu.Lock()
				defer s.mu.Unlock()
				return s.records[d.Addr][epoch] == sent
			})
		}
	}
	f.Silence(true)
	before, _ := f.Total()
	nstest.Steadily(t, 100*time.Millisecond, func() error {
		if after, _ := f.Total(); after != before {
			return fmt.Errorf("%d datagrams were sent during silence", after-before)
		}
		return nil
	})
	f.Silence(false)
	for i, d := range f.Devices {
		nstest.Until(t, fmt.Sprintf("%s sends routes", d.Addr), func() bool { return f.Sent(BMP, i, f.Epoch()) > 0 })
	}
	f.Stop()
	for i, d := range f.Devices {
		sent := 0
		for epoch := uint32(1); epoch <= f.Epoch(); epoch++ {
			sent += f.Sent(BMP, i, epoch)
		}
		if sent == 0 {
			t.Errorf("%s sent no routes", d.Addr)
		}
		// The last messages may still be in transit to the sink.
		nstest.Until(t, fmt.Sprintf("all of the %[2]d routes of %[1]s arrived", d.Addr, sent), func() bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			return s.routes[d.Addr] == sent
		})
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, d := range f.Devices {
		n := 0
		for at, there := uint32(0), true; there; n++ {
			at, there = s.follows[d.Addr][at]
		}
		if n-1 != len(s.follows[d.Addr]) {
			t.Errorf("%s: %d messages in sequence, %d arrived", d.Addr, n-1, len(s.follows[d.Addr]))
		}
	}
}

// A sparse device announces its template once, over all epochs, and again after a reminder. It records its
// send times.
func TestSparse(t *testing.T) {
	s, at := startSink(t)
	f := startSparse(t, at, 2, nil)
	announced := func(device int) int {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.templates[f.Devices[device].Addr]
	}
	for range 3 {
		epoch := f.Epoch()
		nstest.Until(t, "every device has sent in every epoch", func() bool {
			for i := range f.Devices {
				if f.Sent(IPFIX, i, epoch) < 6 {
					return false
				}
			}
			return true
		})
		f.Advance()
		if sent, at := f.Sent(IPFIX, 0, epoch), f.SentAt(0, epoch); len(at)*3 != sent {
			t.Errorf("epoch %d: %d records sent, at %d times", epoch, sent, len(at))
		}
	}
	if f.Sparse(1) || !f.Sparse(0) || len(f.SentAt(1, 1)) != 0 {
		t.Error("every second device is sparse, beginning with the first")
	}
	nstest.Until(t, "a device announces its template in each epoch unless it is sparse", func() bool { return announced(1) >= 3 })
	for i := range f.Devices {
		if n := announced(i); f.Sparse(i) && n != 1 {
			t.Errorf("device %d is sparse and announced its template %d times", i, n)
		}
	}
	f.Remind(0)
	nstest.Until(t, "a sparse device announces its template after a reminder", func() bool { return announced(0) == 2 })
}

// A device sends no IPFIX until its collector has opened its session.
func TestOpened(t *testing.T) {
	_, at := startSink(t)
	var taken atomic.Bool
	f := startWith(t, Config{To4: at, Opened: func(int, int) bool { return taken.Load() }})
	nstest.Until(t, "all devices are up", func() bool { return f.Up() == devices })
	f.Advance()
	for i := range f.Devices {
		nstest.Until(t, "routes are sent", func() bool { return f.Sent(BMP, i, 2) > 5 })
		if n := f.Sent(IPFIX, i, 2); n > 3 { // one message may have been in transit at the start of the session
			t.Errorf("device %d sent %d records before its session was opened", i, n)
		}
	}
	taken.Store(true)
	for i := range f.Devices {
		nstest.Until(t, "a device sends IPFIX after its session was opened", func() bool { return f.Sent(IPFIX, i, 2) > 3 })
	}
}

// In a storm every device ends its session and opens a new one. Its number is at least the one from Storm.
func TestStorm(t *testing.T) {
	s, at := startSink(t)
	f := startFleet(t, at, nil)
	nstest.Until(t, "all devices are up", func() bool { return f.Up() == devices })
	before := make([]int, devices)
	for i := range before {
		before[i], _ = f.Session(i)
	}
	after := f.Storm()
	nstest.Until(t, "all devices are up after the storm", func() bool {
		for i := range f.Devices {
			if n, up := f.Session(i); !up || n < after[i] {
				return false
			}
		}
		return true
	})
	nstest.Until(t, "every device connected twice", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, d := range f.Devices {
			if s.sessions[d.Addr] != 2 {
				return false
			}
		}
		return true
	})
	for i := range before {
		if after[i] <= before[i] {
			t.Errorf("device %d: session %d before, %d after the storm", i, before[i], after[i])
		}
	}
}

// A device notices the end of its session by the collector, and reconnects.
func TestLost(t *testing.T) {
	s, at := startSink(t)
	var mu sync.Mutex
	lost := map[netip.Addr]int{}
	f := startFleet(t, at, func(e Event) {
		mu.Lock()
		defer mu.Unlock()
		if e.Kind == Lost {
			lost[e.Device.Addr]++
		}
	})
	nstest.Until(t, "all devices are up", func() bool { return f.Up() == devices })
	// A device is up when it is connected, and the sink may accept later.
	nstest.Until(t, "the sink accepted all connections", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.conns) == devices
	})
	s.mu.Lock()
	for _, c := range s.conns {
		c.Close()
	}
	s.mu.Unlock()
	nstest.Until(t, "every device noticed", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(lost) == devices
	})
	nstest.Until(t, "all devices are back", func() bool { return f.Up() == devices })
}

// Without a listener, both protocols report it.
func TestRefused(t *testing.T) {
	var mu sync.Mutex
	seen := map[Kind]error{}
	startFleet(t, netip.MustParseAddrPort("127.0.0.1:9"), func(e Event) {
		mu.Lock()
		defer mu.Unlock()
		seen[e.Kind] = e.Err
	})
	nstest.Until(t, "both protocols report the refusal", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return seen[Refused] != nil && seen[ConnectFailed] != nil
	})
	mu.Lock()
	defer mu.Unlock()
	for kind, err := range seen {
		if !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("%s: %v", kind, err)
		}
	}
}
