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

// Kind is a kind of event in a device's traffic.
type Kind string

const (
	Refused       Kind = "refused"        // an ICMP error arrived for a datagram
	ConnectFailed Kind = "connect failed" // a BMP connection was reset or refused before it was up
	Lost          Kind = "session lost"   // a BMP session ended, but not by the device
)

// Event is an event in a device's traffic, noticed as by a real router.
type Event struct {
	Time     time.Time
	Device   *Device
	Protocol Protocol
	Kind     Kind
	Err      error
}

// TemplateTimeout is the interval of a sparse device's template: the default of routers, 600 s like RFC
// 6728's templateRefreshTimeout.
const TemplateTimeout = 600 * time.Second

// Config describes a fleet.
type Config struct {
	Devices int // number of devices
	IPv6    int // number of devices over IPv6, the last ones
	// First4 and First6 are the source addresses of the first device of each family; the next ones follow.
	First4, First6 netip.Addr
	// To4 and To6 are the destinations of each family for both protocols.
	To4, To6 netip.AddrPort
	Rate     float64       // messages a second, for each device and protocol
	Records  int           // data records in an IPFIX message
	Refresh  int           // interval of IPFIX templates in messages, besides the first of each epoch
	Sparse   int           // every Sparse-th device announces its template only at its start and once in TemplateTimeout; 0: none
	Retry    time.Duration // between two attempts to connect
	Ramp     time.Duration // between the first connects of two devices; 0: all at the same time
	NS       *netns.Handle // namespace of the devices
	Notice   func(Event)   // called from many goroutines
	// Opened reports whether the collector has opened the device's BMP session of this number. Until then
	// the device sends no IPFIX. Called from many goroutines; nil: always true.
	Opened func(device, session int) bool
}

// Fleet is a number of sending devices.
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

// lane is one protocol of one device, with its counts.
type lane struct {
	dev  *Device
	mu   sync.Mutex // held from reading the epoch until the sent records are counted
	sent map[uint32]int
	n    uint32 // records, or routes, sent in total

	session atomic.Int64 // BMP: number of the latest session, counting attempts
	opening atomic.Bool  // BMP: a session was begun, without a failure since
	up      atomic.Bool
	refused atomic.Int64 // IPFIX: time of the last refused datagram, in ns of Unix time

	sparse bool        // see Config.Sparse
	remind atomic.Bool // announce the template once more
	sentAt map[uint32][]time.Time
	waited []time.Time // see WaitedAt
}

// New creates a fleet; nothing is sent before Start. The first epoch is 1, because 0 means a record without
// one.
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

// await returns after the current sender has sent and counted; the next one reads the new settings.
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

// Start makes every device send until Stop.
func (f *Fleet) Start(ctx context.Context) {
	ctx, f.cancel = context.WithCancel(ctx)
	f.dialer = NewDialer(f.cfg.NS)
	for i := range f.Devices {
		// Spread over the interval: real routers do not send in step.
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

// Epoch returns the number in current records.
func (f *Fleet) Epoch() uint32 { return f.epoch.Load() }

// Advance begins a new epoch and returns the previous one. On return nothing more is sent in that epoch:
// Sent is final for it.
func (f *Fleet) Advance() uint32 {
	ended := f.epoch.Add(1) - 1
	for _, l := range f.lanes {
		l.await()
	}
	return ended
}

// Silence stops all IPFIX, or resumes it. On return nothing more is sent.
func (f *Fleet) Silence(on bool) {
	f.silent.Store(on)
	for i := range f.Devices {
		f.lane(IPFIX, i).await()
	}
}

// Sent returns the number of records (IPFIX) or routes (BMP) of a device in an epoch, by its index.
func (f *Fleet) Sent(p Protocol, device int, epoch uint32) int {
	l := f.lane(p, device)
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.sent[epoch]
}

// Sparse reports whether a device repeats its template only once in TemplateTimeout.
func (f *Fleet) Sparse(device int) bool { return f.lane(IPFIX, device).sparse }

// Remind makes a device announce its template with its next message.
func (f *Fleet) Remind(device int) { f.lane(IPFIX, device).remind.Store(true) }

// SentAt returns the times of a sparse device's IPFIX messages in an epoch.
func (f *Fleet) SentAt(device int, epoch uint32) []time.Time {
	l := f.lane(IPFIX, device)
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.sentAt[epoch])
}

// WaitedAt returns the times of a sparse device's held IPFIX messages. It holds them while its BMP session
// opens.
func (f *Fleet) WaitedAt(device int) []time.Time {
	l := f.lane(IPFIX, device)
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.waited)
}

// Session returns the number of a device's BMP session, and whether the device considers it up. Only its
// collector knows the truth: a full backlog completes the handshake for the client alone.
func (f *Fleet) Session(device int) (number int, up bool) {
	l := f.lane(BMP, device)
	return int(l.session.Load()), l.up.Load()
}

// waits reports whether a device holds its IPFIX because its BMP session is opening.
func (f *Fleet) waits(device int) bool {
	l := f.lane(BMP, device)
	return f.cfg.Opened != nil && l.opening.Load() && !f.cfg.Opened(device, int(l.session.Load()))
}

// Up returns the number of devices with a BMP session they consider up.
func (f *Fleet) Up() int { return int(f.up.Load()) }

// Total returns the number of IPFIX and BMP messages since the start.
func (f *Fleet) Total() (datagrams, messages int64) { return f.datagrams.Load(), f.messages.Load() }

// Storm makes every device end its session and reconnect, all at the same moment. It returns by index the
// first session number after the storm.
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

// newSession counts a session and returns the channel to end it. Both happen under one lock: every session
// older than a storm ends by it.
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
