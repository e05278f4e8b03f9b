// SPDX-License-Identifier: Apache-2.0

package routers

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weir-project/weir/internal/netns"
)

// Protocol is one of the two streams of a device.
type Protocol string

const (
	IPFIX Protocol = "ipfix"
	BMP   Protocol = "bmp"
)

// Kind is what happened to a device's traffic.
type Kind string

const (
	Refused       Kind = "refused"        // an ICMP error came back for a datagram
	ConnectFailed Kind = "connect failed" // a BMP connection was reset or refused before it was up
	Lost          Kind = "session lost"   // a BMP session ended that the device did not end
)

// Event is something that a device noticed about its traffic, as a real router would.
type Event struct {
	Time     time.Time
	Device   *Device
	Protocol Protocol
	Kind     Kind
	Err      error
}

// TemplateTimeout is how long a sparse device waits before it repeats its template: what routers are shipped
// with, 600 s as for RFC 6728's templateRefreshTimeout.
const TemplateTimeout = 600 * time.Second

// Config describes a fleet.
type Config struct {
	Devices int // how many
	IPv6    int // how many of them, the last ones, send over IPv6
	// First4 and First6 are the source addresses of the first device of each family; the next ones follow.
	First4, First6 netip.Addr
	// To4 and To6 are where devices of each family send both protocols.
	To4, To6 netip.AddrPort
	Rate     float64       // messages a second, a device and a protocol
	Records  int           // data records in an IPFIX message
	Refresh  int           // an IPFIX template in every so many messages, besides the first of each epoch
	Sparse   int           // every so manieth device announces its template when it starts and once in TemplateTimeout, whatever happens; 0: none
	Retry    time.Duration // between two attempts to connect
	Ramp     time.Duration // between the first connects of two devices; 0: all at once
	NS       *netns.Handle // where the devices live
	Notice   func(Event)   // called from many goroutines
	// Opened tells whether the collector has taken up a device's BMP session of that number; while it has not, the
	// device sends no IPFIX. Called from many goroutines; nil: always.
	Opened func(device, session int) bool
}

// Fleet is a number of devices that send.
type Fleet struct {
	Devices []*Device

	cfg    Config
	dialer *Dialer
	epoch  atomic.Uint32
	lanes  []*lane
	cancel context.CancelFunc
	wg     sync.WaitGroup

	silent atomic.Bool // no IPFIX is sent

	stormMu sync.Mutex
	storm   chan struct{} // closed to end every session at once

	up        atomic.Int64
	datagrams atomic.Int64
	messages  atomic.Int64
}

// lane is one protocol of one device and what it sent.
type lane struct {
	dev  *Device
	mu   sync.Mutex // held from reading the epoch until what was sent in it is counted
	sent map[uint32]int
	n    uint32 // records, or routes, sent in all

	session atomic.Int64 // BMP: number of the latest session, counting attempts
	opening atomic.Bool  // BMP: a session was begun, and has not failed since
	up      atomic.Bool
	refused atomic.Int64 // IPFIX: when a datagram was, in nanoseconds of Unix time

	sparse bool        // see Config.Sparse
	remind atomic.Bool // announce the template once more
	sentAt map[uint32][]time.Time
	waited []time.Time // see WaitedAt
}

// New makes a fleet; nothing is sent before Start. The first epoch is 1, so that a collector's 0 means
// that a record had none.
func New(cfg Config) (*Fleet, error) {
	if cfg.IPv6 > cfg.Devices || cfg.Rate <= 0 {
		return nil, fmt.Errorf("a fleet of %d devices, %d of them over IPv6, at %g messages a second", cfg.Devices, cfg.IPv6, cfg.Rate)
	}
	f := &Fleet{cfg: cfg, storm: make(chan struct{})}
	f.epoch.Store(1)
	next4, next6 := cfg.First4, cfg.First6
	for i := range cfg.Devices {
		addr := &next4
		if i >= cfg.Devices-cfg.IPv6 {
			addr = &next6
		}
		f.Devices = append(f.Devices, NewDevice(i, *addr))
		*addr = addr.Next()
	}
	for i, d := range append(f.Devices[:len(f.Devices):len(f.Devices)], f.Devices...) { // IPFIX, then BMP
		l := &lane{dev: d, sent: map[uint32]int{}, sentAt: map[uint32][]time.Time{}}
		l.sparse = cfg.Sparse > 0 && i < cfg.Devices && i%cfg.Sparse == 0
		f.lanes = append(f.lanes, l)
	}
	return f, nil
}

// await returns when whoever was sending has sent and counted it; the next one sees what was set before.
func (l *lane) await() {
	l.mu.Lock()
	defer l.mu.Unlock()
}

func (f *Fleet) lane(p Protocol, device int) *lane {
	if p == IPFIX {
		return f.lanes[device]
	}
	return f.lanes[len(f.Devices)+device]
}

// Start lets every device send until Stop.
func (f *Fleet) Start(ctx context.Context) {
	ctx, f.cancel = context.WithCancel(ctx)
	f.dialer = NewDialer(f.cfg.NS)
	for i := range f.Devices {
		// Spread over the interval: real routers do not tick together.
		phase := f.interval() * time.Duration(i) / time.Duration(len(f.Devices))
		f.wg.Go(func() { f.sendIPFIX(ctx, f.lane(IPFIX, i), phase) })
		f.wg.Go(func() { f.holdBMP(ctx, f.lane(BMP, i), phase) })
	}
}

// Stop ends all traffic and closes every session.
func (f *Fleet) Stop() {
	if f.cancel == nil {
		return
	}
	f.cancel()
	f.wg.Wait()
	f.dialer.Close()
	f.cancel = nil
}

func (f *Fleet) interval() time.Duration {
	return time.Duration(float64(time.Second) / f.cfg.Rate)
}

func (f *Fleet) target(d *Device) netip.AddrPort {
	if d.Addr.Is4() {
		return f.cfg.To4
	}
	return f.cfg.To6
}

// Epoch is the number that records carry now.
func (f *Fleet) Epoch() uint32 { return f.epoch.Load() }

// Advance begins a new epoch and returns the one that ended. When it returns, nothing more is sent in that
// epoch: what Sent says of it is final.
func (f *Fleet) Advance() uint32 {
	ended := f.epoch.Add(1) - 1
	for _, l := range f.lanes {
		l.await()
	}
	return ended
}

// Silence stops all IPFIX, or lets it go on. When it returns, nothing more is sent.
func (f *Fleet) Silence(on bool) {
	f.silent.Store(on)
	for i := range f.Devices {
		f.lane(IPFIX, i).await()
	}
}

// Sent is how many records (IPFIX) or routes (BMP) a device sent in an epoch, by its index.
func (f *Fleet) Sent(p Protocol, device int, epoch uint32) int {
	l := f.lane(p, device)
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.sent[epoch]
}

// Sparse tells whether a device repeats its template only once in TemplateTimeout.
func (f *Fleet) Sparse(device int) bool { return f.lane(IPFIX, device).sparse }

// Remind makes a device announce its template with its next message.
func (f *Fleet) Remind(device int) { f.lane(IPFIX, device).remind.Store(true) }

// SentAt is when a sparse device sent each IPFIX message of an epoch.
func (f *Fleet) SentAt(device int, epoch uint32) []time.Time {
	l := f.lane(IPFIX, device)
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.sentAt[epoch])
}

// WaitedAt is when a sparse device would have sent an IPFIX message and did not, for its BMP session was being opened.
func (f *Fleet) WaitedAt(device int) []time.Time {
	l := f.lane(IPFIX, device)
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.waited)
}

// Session is the number of a device's BMP session and whether the device holds it to be up. Whether it is,
// only its collector knows: a full backlog completes the handshake for the client alone.
func (f *Fleet) Session(device int) (number int, up bool) {
	l := f.lane(BMP, device)
	return int(l.session.Load()), l.up.Load()
}

// waits tells whether a device sends no IPFIX because its BMP session is being opened.
func (f *Fleet) waits(device int) bool {
	l := f.lane(BMP, device)
	return f.cfg.Opened != nil && l.opening.Load() && !f.cfg.Opened(device, int(l.session.Load()))
}

// Up is how many devices hold their BMP session to be up.
func (f *Fleet) Up() int { return int(f.up.Load()) }

// Total is what was sent since the start: IPFIX messages and BMP messages.
func (f *Fleet) Total() (datagrams, messages int64) { return f.datagrams.Load(), f.messages.Load() }

// Storm makes every device end its session and connect anew, all at the same moment. It returns the number
// from which on each device's sessions are newer than the storm, by index.
func (f *Fleet) Storm() []int {
	f.stormMu.Lock()
	defer f.stormMu.Unlock()
	after := make([]int, len(f.Devices))
	for i := range f.Devices {
		after[i] = int(f.lane(BMP, i).session.Load()) + 1
	}
	close(f.storm)
	f.storm = make(chan struct{})
	return after
}

// newSession counts a session and returns what will end it. Both at once: a session that Storm counts as
// older is one that it ends.
func (f *Fleet) newSession(l *lane) <-chan struct{} {
	f.stormMu.Lock()
	defer f.stormMu.Unlock()
	l.session.Add(1)
	return f.storm
}

func (f *Fleet) notice(l *lane, p Protocol, k Kind, err error) {
	if f.cfg.Notice != nil {
		f.cfg.Notice(Event{time.Now(), l.dev, p, k, err})
	}
}
