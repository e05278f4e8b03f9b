// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/filter/expr"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

var _ feature.Explainer = Feature{}

// Explain implements feature.Explainer. It returns each filter's verdict on a packet, with the
// deciding rule. The kernel runs a copy of the filter's program by BPF_PROG_TEST_RUN. The copy
// shares the filter's lists and has its own counts and rates.
func (Feature) Explain(_ context.Context, r *kernel.Root, p feature.Packet) ([]feature.Verdict, error) {
	all, unreadable, err := filters.All(r)
	if err != nil {
		return nil, err
	}
	out := feature.UnreadSights(unreadable, p, feature.StageXDP)
	for _, rec := range all {
		s, err := explainFilter(r, rec.Instance, p)
		if errors.Is(err, kernel.ErrNotExist) || errors.Is(err, netns.ErrGone) {
			continue
		} else if err != nil {
			return nil, fmt.Errorf("filter %s: %w", rec.Name, err)
		}
		out = append(out, s...)
	}
	return out, nil
}

func explainFilter(r *kernel.Root, i kernel.Instance, p feature.Packet) ([]feature.Verdict, error) {
	u, err := filters.Open(r, i)
	if err != nil {
		return nil, err
	}
	defer u.Close()
	pub := publishedFrom(u.Record)
	stage, comes := pub.Filter.meets(p)
	if pub.meta.Inode != p.Inode || !comes {
		return nil, nil
	}
	attachments, err := pub.Attacher.attacher().attachments(&instance{inst: i, pub: pub, pins: u.Pins, ns: u.Netns})
	if err != nil {
		return nil, err
	}
	where := pub.Filter.attachmentFor(attachments, p)
	if where == nil {
		return nil, nil
	}
	s := feature.Verdict{Stage: stage, Order: pub.order(where), ExplainStep: feature.ExplainStep{Step: "filter " + i.Name}}
	if !where.Attached {
		s.Text, s.Warning = where.Name+": "+where.Problem, true
		return []feature.Verdict{s}, nil
	}
	hits, err := pub.try(u.Pins, p)
	if err != nil {
		return nil, err
	}
	tell(&s, pub.Filter, where, hits, p)
	return []feature.Verdict{s}, nil
}

// meets returns the stage at which a filter sees an arriving packet, and whether it sees it.
func (f Filter) meets(p feature.Packet) (feature.Stage, bool) {
	switch {
	case f.Hook.ofDevices() && (f.Direction == Egress || !slices.Contains(f.Interfaces, p.Interface)):
		return 0, false
	case f.Hook.xdp():
		return feature.StageXDP, true
	case f.Hook.ofDevices():
		return feature.StageTC, true
	case f.At == "prerouting":
		return feature.StagePrerouting, true
	}
	return feature.StageInput, f.At == "input"
}

// order returns the filter's rank among the programs of weir at an attachment.
func (p *published) order(at *Attachment) int32 {
	switch {
	case at.Position != nil:
		return int32(at.Position.Number)
	case p.Attacher == attacherClsact:
		return tcPriority
	}
	return p.Filter.Priority
}

// attachmentFor returns the attachment traversed by the packet, or nil.
func (f Filter) attachmentFor(attachments []Attachment, p feature.Packet) *Attachment {
	for i := range attachments {
		at := &attachments[i]
		switch {
		case f.Hook.ofDevices() && at.Interface != p.Interface:
		case f.Hook == HookNetfilter && (at.pin == families[0].pin) != p.To.Addr().Is4():
		default:
			return at
		}
	}
	return nil
}

// try runs the published rules on a packet in the kernel. It returns the indices of the counting
// rules in order, the deciding one last. The index of the default is the number of rules.
func (p *published) try(o *kernel.Opened, packet feature.Packet) (hits []int, err error) {
	q := *p
	q.Lists = map[string]*list{}
	for name, l := range p.Lists {
		same := *l
		q.Lists[name] = &same
	}
	if q.Raw { // test runs have an Ethernet header; the nft program starts at the IP header instead
		q.Raw, q.Filter.Hook = false, HookNFT
	}
	c, _, err := q.compileAndLoad(func() map[string]*ebpf.Map { return inheritLists(q.Lists, p.Lists, o.Maps) })
	if err != nil {
		return nil, err
	}
	defer c.Close()
	data, err := packet.Frame()
	if err != nil {
		return nil, err
	}
	if q.Filter.Hook == HookNetfilter {
		data = data[ethernetHeader:] // netfilter test runs start at the IP header
	}
	if _, err := c.Programs[programName].Run(&ebpf.RunOptions{Data: data}); err != nil {
		return nil, fmt.Errorf("test-run its program (BPF_PROG_TEST_RUN): %w", err)
	}
	for i := range len(q.Filter.Rules) + 1 {
		if t, err := sumCounts(c.Maps[countsMap], i); err != nil {
			return nil, err
		} else if t.Packets > 0 {
			hits = append(hits, i)
		}
	}
	return hits, nil
}

// tell describes the verdict in words.
func tell(s *feature.Verdict, f Filter, at *Attachment, hits []int, p feature.Packet) {
	var said []string
	decided, action := len(f.Rules), f.Default
	for _, i := range hits {
		if i < len(f.Rules) && f.Rules[i].Action == Count {
			said = append(said, f.ruleName(i)+" counts it")
		} else if i < len(f.Rules) {
			decided, action = i, f.Rules[i].Action
		}
	}
	verb := map[Action]string{Pass: "passes it", Drop: "drops it"}[action]
	said = append(said, f.ruleName(decided)+" "+verb)
	s.Text = fmt.Sprintf("%s: %s", at.Name, strings.Join(said, ", "))
	if at.stale {
		s.Text, s.Warning = s.Text+"; "+at.Problem, true
	}
	var more []string
	for i := range min(decided+1, len(f.Rules)) {
		if f.Rules[i].Action != Count && f.Rules[i].mayDiffer(p) {
			more = append(more, f.ruleName(i))
		}
	}
	if len(more) > 0 {
		const shown = 5
		list := strings.Join(more[:min(shown, len(more))], ", ")
		if len(more) > shown {
			list += fmt.Sprintf(" and %d others", len(more)-shown)
		}
		plain := fmt.Sprintf("%d bytes of payload", len(feature.FramePayload))
		if p.Proto == "tcp" {
			plain = "a SYN without options"
		}
		s.Text += fmt.Sprintf(". This applies to a plain packet (TTL 64, %s): for others with these addresses and ports, %s may decide otherwise", plain, list)
	}
	if action == Drop {
		s.Result = fmt.Sprintf("dropped: %s of filter %s, at %s", f.ruleName(decided), f.Name, at.Name)
	}
}

// ruleName names a rule for the user; i is the number of rules for the default.
func (f Filter) ruleName(i int) string {
	if i == len(f.Rules) {
		return "the default"
	}
	return fmt.Sprintf("rule %d (%s)", i+1, f.Rules[i].Key())
}

// mayDiffer reports whether the rule can match some packets with the addresses, ports and protocol
// of p but not others, judging by its text.
func (r Rule) mayDiffer(p feature.Packet) bool {
	e, err := expr.Parse(r.Match.Text)
	if err != nil {
		return true
	}
	frame, err := p.Frame()
	if err != nil {
		return true
	}
	_, known := decided(e.Root, &expr.Packet{Data: frame, Layer: expr.Link}, p)
	return !known
}

// decided evaluates an expression by a packet's protocol, addresses and ports alone. known is false
// if they do not suffice.
func decided(n expr.Node, frame *expr.Packet, p feature.Packet) (is, known bool) {
	switch n := n.(type) {
	case *expr.Not:
		is, known = decided(n.X, frame, p)
		return !is, known
	case *expr.And:
		return decideAny(n.X, false, frame, p)
	case *expr.Or:
		return decideAny(n.X, true, frame, p)
	case *expr.Xor:
		known = true
		for _, x := range n.X {
			i, k := decided(x, frame, p)
			is, known = is != i, known && k
		}
		return is, known
	case *expr.Rate:
		return false, false
	case *expr.In:
		if n.List != "" {
			return false, false // the list contents are in the program
		}
	}
	for _, x := range expr.Operands(n) {
		if !given(x.Field, p) {
			return false, false
		}
	}
	return (&expr.Expr{Root: n}).Eval(frame), true
}

// decideAny evaluates several nodes, one of which decides if its value is so.
func decideAny(nodes []expr.Node, so bool, frame *expr.Packet, p feature.Packet) (is, known bool) {
	known = true
	for _, x := range nodes {
		i, k := decided(x, frame, p)
		if k && i == so {
			return so, true
		}
		known = known && k
	}
	return !so, known
}

// given reports whether a field's value follows from a packet's protocol, addresses and ports.
func given(f *expr.Field, p feature.Packet) bool {
	absent := map[string]bool{"ip": !p.To.Addr().Is4(), "ipv6": p.To.Addr().Is4(), "tcp": p.Proto == "udp", "udp": p.Proto == "tcp",
		"icmp": true, "icmpv6": true}
	proto, rest, _ := strings.Cut(f.Name, ".")
	switch rest {
	case "src", "dst", "addr", "srcport", "dstport", "port":
		return proto != "eth"
	case "":
		_, known := absent[proto]
		return known
	case "version", "proto":
		return true
	}
	return absent[proto]
}
