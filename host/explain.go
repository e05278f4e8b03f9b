// SPDX-License-Identifier: Apache-2.0

package host

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"

	"github.com/vishvananda/netlink"
	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// Explain describes step by step where a packet goes: the decisions of features on its way in the kernel's order, and
// the receiving socket. It needs root. It does not evaluate firewall rules or foreign programs.
func (h *Host) Explain(ctx context.Context, p feature.Packet) (*feature.Explanation, error) {
	if err := p.Check(); err != nil {
		return nil, err
	}
	ns, err := p.OpenNetns()
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	p.Inode = ns.Inode()
	out := &feature.Explanation{Proto: p.Proto, From: p.From.String(), To: p.To.String(), Netns: ns.String()}
	var sights []feature.Verdict
	arrival := feature.ExplainStep{Step: "arrival", Text: "by " + p.Interface}
	if p.Interface != "" {
		if err := ns.Do(func() error { _, err := netlink.LinkByName(p.Interface); return err }); err != nil {
			return nil, fmt.Errorf("interface %s of %s: %w", p.Interface, ns, err)
		}
	} else if p.Interface, err = back(ns, p); err != nil {
		arrival.Text, arrival.Warning = fmt.Sprintf("%v: programs at interfaces are not evaluated; name one with --interface", err), true
	} else {
		arrival.Text = fmt.Sprintf("by %s, the interface of the route back to %s; name another with --interface", p.Interface, p.From.Addr())
	}
	for _, f := range features {
		if e, ok := f.Value.(feature.Explainer); ok {
			s, err := e.Explain(ctx, h.Root, p)
			if err != nil {
				return nil, err
			}
			sights = append(sights, s...)
		}
	}
	slices.SortStableFunc(sights, func(a, b feature.Verdict) int {
		return cmp.Or(cmp.Compare(a.Stage, b.Stage), cmp.Compare(a.Order, b.Order))
	})
	out.Steps = append(out.Steps, arrival)
	sights, forward := split(sights)
	i := 0
	pass := func(before feature.Stage) (dropped bool) {
		for ; i < len(sights) && sights[i].Stage < before; i++ {
			out.Steps = append(out.Steps, sights[i].ExplainStep)
			if out.Result = sights[i].Result; out.Result != "" {
				return true
			}
		}
		return false
	}
	if pass(feature.StageInput) {
		return out, nil
	}
	to, why, result, err := route(ns, p, len(forward) > 0)
	if err != nil {
		return nil, err
	}
	out.Steps = append(out.Steps, why)
	if to == deliverForward {
		return out, h.explainForward(ctx, ns, p, forward, out)
	}
	if to == deliverNone {
		out.Result = result
		return out, nil
	}
	if pass(feature.StageLookup) {
		return out, nil
	}
	if err := h.explainFaults(ctx, ns, p, out); err != nil {
		return nil, err
	}
	lookup := out
	for _, f := range features {
		if d, ok := f.Value.(feature.Deliverer); ok {
			if lookup, err = d.Deliver(ctx, h.Root, p, to == deliverEvery); err != nil {
				return nil, err
			}
		}
	}
	if lookup != out {
		lookup.Steps = append(out.Steps, lookup.Steps...)
	}
	for ; i < len(sights) && lookup.PID != 0; i++ {
		lookup.Steps = append(lookup.Steps, sights[i].ExplainStep)
	}
	return lookup, nil
}

// split separates verdicts about packets for this host from verdicts about forwarded packets.
func split(all []feature.Verdict) (here, forward []feature.Verdict) {
	at := slices.IndexFunc(all, func(v feature.Verdict) bool { return v.Stage == feature.StageForward })
	if at < 0 {
		return all, nil
	}
	return all[:at], all[at:]
}

// explainForward completes the explanation of a packet handled by a feature on its way out.
func (h *Host) explainForward(ctx context.Context, ns *netns.Handle, p feature.Packet, forward []feature.Verdict, out *feature.Explanation) error {
	if err := h.explainFaults(ctx, ns, p, out); err != nil {
		return err
	}
	for _, v := range forward {
		out.Steps = append(out.Steps, v.ExplainStep)
		if out.Result = v.Result; out.Result != "" {
			return nil
		}
	}
	out.Result = fmt.Sprintf("forwarded to %s", p.To.Addr())
	return nil
}

// explainFaults adds damage and foreign programs on the packet's way.
func (h *Host) explainFaults(ctx context.Context, ns *netns.Handle, p feature.Packet, out *feature.Explanation) error {
	faults, err := h.Faults(ctx)
	for _, f := range faults {
		here := f.Kind == kernel.FaultRoot || f.Instance.Scope == kernel.HostScope || f.Instance.Scope == strconv.FormatUint(ns.Inode(), 10)
		if here && (f.Device == "" || f.Device == p.Interface) {
			out.Steps = append(out.Steps, feature.ExplainStep{Step: string(f.Kind), Text: fmt.Sprintf("%s: %s", f, f.Remedy), Warning: true})
		}
	}
	return err
}

// back returns the interface of a namespace's route to the packet's source. Rules may select it by the answering
// address.
func back(ns *netns.Handle, p feature.Packet) (name string, err error) {
	err = ns.Do(func() error {
		routes, err := netlink.RouteGetWithOptions(p.From.Addr().AsSlice(), &netlink.RouteGetOptions{SrcAddr: p.To.Addr().AsSlice()})
		if err != nil || len(routes) == 0 { // the address is not this host's
			routes, err = netlink.RouteGet(p.From.Addr().AsSlice())
		}
		if err != nil || len(routes) == 0 {
			return fmt.Errorf("no route leads back to %s", p.From.Addr())
		}
		l, err := netlink.LinkByIndex(routes[0].LinkIndex)
		if err != nil {
			return fmt.Errorf("the interface of the route back to %s: %w", p.From.Addr(), err)
		}
		name = l.Attrs().Name
		return nil
	})
	return name, err
}
