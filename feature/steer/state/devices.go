// SPDX-License-Identifier: Apache-2.0

package state

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/internal/sockdiag"
	"github.com/weir-project/weir/kernel"
	"golang.org/x/sys/unix"
)

// Device is a source of a service: one address, or all addresses of a device. Bucket and Slot are -1 if the policy does
// not keep devices in one slot.
type Device struct {
	Address  netip.Addr `json:"address"`        // the first address of a named device
	Name     string     `json:"name,omitempty"` // by: device
	Bucket   int        `json:"bucket"`
	Slot     int        `json:"slot"`
	First    time.Time  `json:"first_seen"`
	Last     time.Time  `json:"last_seen"`
	LastUDP  time.Time  `json:"last_udp,omitzero"`
	LastTCP  time.Time  `json:"last_tcp,omitzero"` // connection attempt, or data on a session
	UDP      uint64     `json:"udp_packets"`
	Rate     float64    `json:"udp_packets_per_second"` // average of about the last 10 s
	Connects uint64     `json:"tcp_connects"`
	Sessions int        `json:"tcp_sessions"` // established now
	Bytes    uint64     `json:"tcp_bytes"`    // received on these sessions
}

// rateWindow is STEER_RATE_WINDOW.
const rateWindow = 10 * time.Second

// Devices lists the sources of a service in order of address. Session data comes from sock_diag. If that fails,
// sessions are zero and problem contains the reason.
func (s *Service) Devices(r *kernel.Root) (devices []Device, problem, err error) {
	e, err := r.Open(record.EngineInstance(s.PinScope, s.Engine), "devices")
	if err != nil {
		return nil, nil, err
	}
	defer e.Close()
	all, err := engine.Entries[bpf.SteerDeviceKey, bpf.SteerDevice](e.Maps["devices"])
	if err != nil {
		return nil, nil, fmt.Errorf("read devices: %w", err)
	}
	by := map[netip.Addr]*Device{}
	now := kernel.Monotonic()
	for k, d := range all {
		if k.Service == s.Record.ID {
			a := netip.AddrFrom16(k.Addr).Unmap()
			by[a] = newDevice(&d, a, now)
		}
	}
	problem = s.addSessions(by)
	m, merr := s.Mapping(WhatIf{})
	for a, d := range by {
		switch {
		case !s.By.KeepsDevices():
			d.Bucket, d.Slot = -1, -1
		case merr == nil && len(s.Table) > 0:
			p := m.Assign(a)
			d.Name, d.Bucket, d.Slot = p.Device, p.Bucket, p.Slot
		}
		devices = append(devices, *d)
	}
	slices.SortFunc(devices, func(a, b Device) int { return a.Address.Compare(b.Address) })
	return devices, problem, nil
}

func newDevice(d *bpf.SteerDevice, a netip.Addr, now uint64) *Device {
	out := &Device{Address: a, First: kernel.WallTime(d.First), LastUDP: kernel.WallTime(d.Last[0]), LastTCP: kernel.WallTime(d.Last[1]),
		UDP: d.Packets[0], Connects: d.Packets[1]}
	out.Last = later(out.LastUDP, out.LastTCP)
	switch open := time.Duration(now - d.Window); {
	case now < d.Window || d.Last[0] == 0:
	case open >= 2*rateWindow && now-d.Last[0] > uint64(rateWindow): // silent since
	case open >= time.Second && (d.Rate == 0 || open > rateWindow/2):
		out.Rate = float64(d.Count) / open.Seconds()
	default:
		out.Rate = float64(d.Rate) / 1000
	}
	return out
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// addSessions adds the established connections of the service's TCP ports.
func (s *Service) addSessions(by map[netip.Addr]*Device) error {
	ns, err := s.OpenNetns()
	if err != nil {
		return err
	}
	defer ns.Close()
	ports := map[uint16]bool{}
	for _, ep := range s.Endpoints {
		if ep.Proto == unix.IPPROTO_TCP {
			ports[ep.Port] = true
		}
	}
	return ns.Do(func() error {
		for port := range ports {
			socks, err := sockdiag.Dump(sockdiag.Query{Proto: unix.IPPROTO_TCP, LocalPort: port,
				States: 1 << unix.BPF_TCP_ESTABLISHED, Info: true})
			if err != nil {
				return err
			}
			for _, sk := range socks {
				a := s.DeviceList.Stands(sk.Remote.Addr())
				d := by[a]
				if d == nil { // connected before steering began
					d = &Device{Address: a}
					by[a] = d
				}
				d.Sessions++
				if sk.Info != nil {
					d.Bytes += sk.Info.BytesReceived
					d.LastTCP = later(d.LastTCP, time.Now().Add(-sk.Info.LastDataRecv).Truncate(time.Millisecond))
					d.Last = later(d.Last, d.LastTCP)
				}
			}
		}
		return nil
	})
}

// DeviceFilter selects devices. The zero value selects all.
type DeviceFilter struct {
	Silent  time.Duration // minimum time without traffic
	Missing string        // "udp" or "tcp": no traffic over this protocol
	Slot    *int
}

// errFilter means that a filter value is not valid.
var errFilter = errors.New("no such filter")

// Check returns an error that wraps errFilter.
func (f DeviceFilter) Check() error {
	if f.Missing != "" && f.Missing != "udp" && f.Missing != "tcp" {
		return fmt.Errorf("%w: --missing %s: want udp or tcp", errFilter, f.Missing)
	}
	return nil
}

// Match reports whether the filter selects a device at time now.
func (f DeviceFilter) Match(d Device, now time.Time) bool {
	switch {
	case f.Silent > 0 && now.Sub(d.Last) < f.Silent,
		f.Missing == "udp" && !d.LastUDP.IsZero(),
		f.Missing == "tcp" && !(d.LastTCP.IsZero() && d.Sessions == 0),
		f.Slot != nil && *f.Slot != d.Slot:
		return false
	}
	return true
}
