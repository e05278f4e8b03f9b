// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/handoff/lb/attachment"
	"github.com/weir-project/weir/feature/handoff/lb/bpf"
	"github.com/weir-project/weir/feature/handoff/lb/explain"
	"github.com/weir-project/weir/feature/handoff/lb/spec"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// Explain implements feature.Explainer. It names the service of a packet, and the backend by its flow or by the table. It reads
// the maps of the data path and changes nothing.
func (Feature) Explain(ctx context.Context, r *kernel.Root, p feature.Packet) ([]feature.Verdict, error) {
	all, unreadable, err := store.In(r, strconv.FormatUint(p.Inode, 10))
	if err != nil {
		return nil, err
	}
	out := feature.UnreadSights(unreadable, p, feature.StageTC)
	for _, rec := range all {
		v, err := explainOne(ctx, r, rec.Instance, p)
		if errors.Is(err, kernel.ErrNotExist) || errors.Is(err, netns.ErrGone) {
			continue // gone, or damaged: the host reports it
		} else if err != nil {
			return nil, fmt.Errorf("load balancer %s: %w", strings.TrimPrefix(rec.Name, spec.PinPrefix), err)
		}
		out = append(out, v...)
	}
	return out, nil
}

func explainOne(ctx context.Context, r *kernel.Root, i kernel.Instance, p feature.Packet) ([]feature.Verdict, error) {
	use, err := store.Open(r, i, "services", "ring", "backends", "macs", "tunnels", "setup", "flows")
	if err != nil {
		return nil, err
	}
	defer use.Close()
	m := use.Pins.Maps
	maps := bpf.LBMaps{LbServices: m["services"], LbRing: m["ring"], LbBackends: m["backends"], LbMacs: m["macs"], LbTunnels: m["tunnels"],
		LbSetup: m["setup"], LbFlows: m["flows"]}
	f := &DataPath{stays: true}
	f.maps.LBMaps = maps
	o := use.Spec.filled()
	x := &explain.Explainer{Name: strings.TrimPrefix(i.Name, spec.PinPrefix), Maps: maps, Pins: use.Pins, Netns: use.Netns, Packet: p, Devices: o.devices(), Buffer: o.BufferDevice,
		At: func(ifindex int) (string, kernel.Clsact) {
			return attachment.Link(ifindex, false), attachment.Filter(ifindex, false)
		},
		Bucket: func(client netip.AddrPort) int { return Key{Client: client}.Bucket() },
		Flow: func(client netip.AddrPort, service int) (Flow, bool, error) {
			fl, err := f.Flow(Key{Client: client, Service: service})
			if errors.Is(err, errNoFlow) {
				return Flow{}, false, nil
			}
			return fl, err == nil, err
		}}
	if o.TunnelMTU > 0 {
		x.Tunnel = o.Tunnel
	}
	if x.Known, err = readKnown(ctx, r, i, use.Netns); err != nil {
		return nil, err
	}
	return x.Verdicts()
}

// readKnown reads the agent's status, and names from the applied configuration if it is of the load balancer's network namespace.
func readKnown(ctx context.Context, r *kernel.Root, i kernel.Instance, ns *netns.Handle) (k explain.Known, err error) {
	s, err := readStatus(ctx, r, i)
	if err != nil {
		return k, err
	}
	k = explain.Known{Agent: s.Agent, Services: map[int]string{}, Names: map[move.Backend]string{}}
	for _, b := range s.Backends {
		k.Backends = append(k.Backends, explain.Backend{Number: b.Number, Name: b.Name, Weight: b.Weight, Up: b.Up, Reason: b.Reason})
	}
	here, err := netns.Current()
	if err != nil {
		return k, err
	}
	defer here.Close()
	c, err := applied.Read(r)
	if err != nil || c == nil || spec.PinPrefix+c.Name != i.Name || !here.Same(ns) { // without a readable configuration numbers replace names
		return k, nil //nolint:nilerr // see above
	}
	for name, s := range c.Services {
		k.Services[s.Number] = name
	}
	for name, b := range c.Backends {
		k.Names[move.Backend(b.Number)] = name
	}
	return k, nil
}
