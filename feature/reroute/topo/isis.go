// SPDX-License-Identifier: Apache-2.0

package topo

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// ISISCommand makes isisd print everything a network needs. The database alone names neighbours by system id and LSPs
// by hostname.
const ISISCommand = "vtysh -c 'show isis hostname' -c 'show isis neighbor detail' -c 'show isis database detail'"

// refuseISISJSON rejects isisd's JSON with the reason. isisd (seen in FRR 8.4, and in the sources of later versions)
// writes the TLVs of an LSP as keys of one JSON object. Of all adjacencies, and of all LSPs, only the last remains.
func refuseISISJSON(file string, _ []byte) (*Network, error) {
	return nil, fmt.Errorf("%s: isisd's JSON keeps only the last adjacency of an LSP and the last LSP of a level: use the output of %s", file, ISISCommand)
}

// isisSystem is one system or pseudonode in one level, with all fragments of its LSP.
type isisSystem struct {
	id       string // 0000.0000.0001.00; "" while unknown
	shown    string // name in the header
	self     bool   // the queried router
	overload bool
	prefixes []isisAnnounced
	end      netip.Addr
	dt6, dt4 netip.Addr
	locator  netip.Prefix
	reach    map[bool][]isisReach // true: of the IPv6 topology (RFC 5120)
	mt       bool                 // takes part in the IPv6 topology
}

type isisReach struct {
	to            string // system id with pseudonode number
	metric        uint64
	local, remote netip.Addr
	endX          netip.Addr
	lanEndX       map[string]netip.Addr // by the neighbour's system id, if to is a pseudonode
}

type isisAnnounced struct {
	netip.Prefix
	metric uint64
}

// maxPrefixMetric is the greatest valid metric of a prefix: RFC 5305 section 4, RFC 5308 section 2.
const maxPrefixMetric = 0xFE000000

var (
	isisHeader = regexp.MustCompile(`^(\S+)\.([0-9a-f]{2})-([0-9a-f]{2})\s+(\*\s+)?\d+\s+0x[0-9a-f]+\s+0x[0-9a-f]+\s+\S+\s+\d/\d/(\d)`)
	isisName   = regexp.MustCompile(`^\s*(?:\d|\*)\s+([0-9a-fA-F]{4}\.[0-9a-fA-F]{4}\.[0-9a-fA-F]{4})\s+(\S+)\s*$`)
	isisLevel  = regexp.MustCompile(`^IS-IS Level-(\d) link-state database`)
	isisEdge   = regexp.MustCompile(`^\s+(MT|Extended) Reachability: ([0-9a-fA-F.]{17}) \(Metric: (\d+)\)(?:\s+(\S+))?`)
	isisPrefix = regexp.MustCompile(`^\s+(?:Extended |MT )?(?:IP|IPv6) Reachability: (\S+) \(Metric: (\d+)\)(?:\s+(ipv\S+))?`)
	isisRemote = regexp.MustCompile(`^\s+Remote Interface IP(?:v6)? Address\(es\): (\S+)`)
	isisLocal  = regexp.MustCompile(`^\s+Local Interface IP(?:v6)? Address\(es\): (\S+)`)
	isisEndX   = regexp.MustCompile(`^\s+SRv6 End\.X SID: ([0-9a-fA-F:]+),`)
	isisLANX   = regexp.MustCompile(`(?i)^\s+SRv6 LAN End\.X SID: ([0-9a-f:]+),.* Neighbor-ID: ([0-9a-f.]{14})`)
	isisEnd    = regexp.MustCompile(`^\s+SRv6 End SID Endpoint Behavior: (End|uN|(?:End\.|u)DT(?:4|6|46))(?: [^,]*)?, SID value: ([0-9a-fA-F:]+)`)
	isisSRv6   = regexp.MustCompile(`^\s+SRv6 Locator: ([0-9a-fA-F:]+/\d+) \(Metric: (\d+)\)`)
	isisHost   = regexp.MustCompile(`^\s+Hostname: (\S+)`)
)

// isisReader reads the text of one database.
type isisReader struct {
	hostnames map[string]string // system id → name
	systems   map[string]*isisSystem
	order     []string
	now       *isisSystem
	edge      *isisReach
	ids       map[string]string // name → system id
	latest    map[string]string // name in a header → system id of the last LSP with it
	self      string            // system id
	ports     []isisPort
}

// readISIS reads the output of ISISCommand. Of two levels it uses level 2, the backbone.
func readISIS(file string, data []byte) (*Network, error) {
	levels := splitLevels(data)
	body, ok := levels[2]
	if !ok {
		body = levels[1]
	}
	r := &isisReader{hostnames: map[string]string{}, systems: map[string]*isisSystem{}, ids: map[string]string{}, latest: map[string]string{}}
	for s := bufio.NewScanner(bytes.NewReader(data)); s.Scan(); {
		if m := isisName.FindStringSubmatch(s.Text()); m != nil {
			id := strings.ToLower(m[1])
			if other, taken := r.ids[m[2]]; taken && other != id {
				return nil, fmt.Errorf("%s: %s and %s are both called %s: give each its own hostname", file, other, id, m[2])
			}
			r.hostnames[id], r.ids[m[2]] = m[2], id
		}
	}
	r.ports = isisPorts(data)
	for _, line := range body {
		if err := r.line(line.text); err != nil {
			return nil, fmt.Errorf("%s:%d: %w", file, line.number, err)
		}
	}
	if err := r.known(); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	n, err := r.network()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	if len(levels) > 1 {
		n.Notes = append(n.Notes, "the database has two levels: level 1 is omitted")
	}
	return n, nil
}

type numbered struct {
	text   string
	number int
}

func splitLevels(data []byte) map[int][]numbered {
	out := map[int][]numbered{}
	level := 0
	for i, text := range strings.Split(string(data), "\n") {
		text = strings.TrimRight(text, "\r")
		if m := isisLevel.FindStringSubmatch(text); m != nil {
			level, _ = strconv.Atoi(m[1])
		} else if level > 0 {
			out[level] = append(out[level], numbered{text, i + 1})
		}
	}
	for l, lines := range out { // isisd lists empty levels too
		if !slices.ContainsFunc(lines, func(n numbered) bool { return isisHeader.MatchString(n.text) }) {
			delete(out, l)
		}
	}
	return out
}

func (r *isisReader) line(text string) error {
	if m := isisHeader.FindStringSubmatch(text); m != nil {
		if err := r.known(); err != nil {
			return err
		}
		return r.begin(&isisSystem{shown: m[1], self: m[4] != "", overload: m[5] == "1", reach: map[bool][]isisReach{}}, m[2], m[3])
	}
	if r.now == nil {
		return nil
	}
	if m := isisHost.FindStringSubmatch(text); m != nil && r.now.id == "" {
		r.register(r.now, r.systemID(m[1]), "00")
		return nil
	}
	if m := isisEdge.FindStringSubmatch(text); m != nil {
		metric, err := strconv.ParseUint(m[3], 10, 32)
		if err != nil {
			return fmt.Errorf("metric %s: %w", m[3], err)
		}
		mt := m[1] == "MT"
		if mt && m[4] != "ipv6-unicast" {
			r.edge = nil
			return nil // multicast and others
		}
		list := append(r.now.reach[mt], isisReach{to: strings.ToLower(m[2]), metric: metric})
		r.now.reach[mt] = list
		r.edge = &list[len(list)-1]
		return nil
	}
	return r.detail(text)
}

// detail reads a line within a TLV.
func (r *isisReader) detail(text string) error {
	if strings.Contains(text, "MT Router Info: ipv6-unicast") {
		r.now.mt = true
		r.now.overload = r.now.overload || strings.Contains(text, "Overload")
		return nil
	}
	if m := isisPrefix.FindStringSubmatch(text); m != nil {
		p, err := netip.ParsePrefix(m[1])
		metric, bad := strconv.ParseUint(m[2], 10, 32)
		if err = errors.Join(err, bad); err != nil {
			return fmt.Errorf("prefix %s: %w", m[1], err)
		}
		r.edge = nil
		if (m[3] == "" || m[3] == "ipv6-unicast" || m[3] == "ipv4-unicast") && metric <= maxPrefixMetric {
			r.now.prefixes = append(r.now.prefixes, isisAnnounced{p.Masked(), metric})
		}
		return nil
	}
	if m := isisEnd.FindStringSubmatch(text); m != nil {
		sid, err := netip.ParseAddr(m[2])
		if err != nil {
			return fmt.Errorf("SID %s: %w", m[2], err)
		}
		r.now.behavior(m[1], sid)
		return nil
	}
	if m := isisSRv6.FindStringSubmatch(text); m != nil {
		p, err := netip.ParsePrefix(m[1])
		if err != nil {
			return fmt.Errorf("locator %s: %w", m[1], err)
		}
		if r.edge = nil; !r.now.locator.IsValid() {
			r.now.locator = p.Masked()
		}
		return nil
	}
	if r.edge == nil {
		return nil
	}
	if m := isisLANX.FindStringSubmatch(text); m != nil {
		a, err := netip.ParseAddr(m[1])
		if err != nil {
			return fmt.Errorf("SID %s: %w", m[1], err)
		}
		if r.edge.lanEndX == nil {
			r.edge.lanEndX = map[string]netip.Addr{}
		}
		r.edge.lanEndX[strings.ToLower(m[2])] = a
		return nil
	}
	for re, to := range map[*regexp.Regexp]*netip.Addr{isisRemote: &r.edge.remote, isisLocal: &r.edge.local, isisEndX: &r.edge.endX} {
		m := re.FindStringSubmatch(text)
		if m == nil {
			continue
		}
		a, err := netip.ParseAddr(strings.TrimRight(m[1], ","))
		if err != nil {
			return fmt.Errorf("address %s: %w", m[1], err)
		}
		if re != isisEndX && to.IsValid() && !a.Is6() {
			continue // with both families, IPv6 addresses distinguish links
		}
		*to = a
	}
	return nil
}

func (r *isisReader) network() (*Network, error) {
	if len(r.order) == 0 {
		return nil, errors.New("the database has no LSP")
	}
	b := NewBuilder("isis")
	mt := slices.ContainsFunc(r.order, func(id string) bool { return r.systems[id].mt && len(r.systems[id].reach[true]) > 0 })
	apart := mt && slices.ContainsFunc(r.order, func(id string) bool { return r.systems[id].apart() })
	slices.Sort(r.order)
	for _, id := range r.order {
		if s := r.systems[id]; s.router() {
			n := b.At(b.Node(r.name(id)))
			n.Overload, n.End, n.DT6, n.DT4, n.Locator = s.overload, s.end, s.dt6, s.dt4, s.locator
			for _, p := range s.prefixes {
				if p.Addr().Is6() || !apart {
					b.Announce(b.Node(r.name(id)), p.Prefix, uint32(p.metric))
				}
			}
		}
	}
	var halves []half
	for _, id := range r.order {
		s := r.systems[id]
		if !s.router() {
			r.lan(b, s, mt)
			continue
		}
		for _, e := range s.edges(mt) {
			far, known := r.systems[e.to]
			if !known {
				b.note("%s announces neighbour %s, but its LSP is not in the database", r.name(id), e.to)
				continue
			}
			if !far.router() || e.metric > maxMetric || far == s {
				continue // 2^24-1 is announced, but not usable (RFC 5305 section 3)
			}
			l := Link{From: b.Node(r.name(id)), To: b.Node(r.name(e.to)), Metric: uint32(max(e.metric, 1)), Local: e.local, Remote: e.remote, EndX: e.endX}
			subnet := s.subnet(e.remote)
			halves = append(halves, half{Link: l, mine: subnet, other: subnet})
		}
	}
	b.join(halves)
	if r.self != "" {
		b.n.Self = r.name(r.self)
		r.nameInterfaces(b)
	}
	if apart {
		b.note("the IPv6 topology differs from the IPv4 topology: IPv4 prefixes are omitted")
	}
	return b.Network()
}

// lan links the routers of a pseudonode, if router and pseudonode list each other.
func (r *isisReader) lan(b *Builder, s *isisSystem, mt bool) {
	var members []member
	for _, e := range append(slices.Clone(s.reach[false]), s.reach[true]...) {
		of := r.systems[e.to]
		if of == nil || !of.router() {
			continue
		}
		for _, up := range of.edges(mt) {
			if up.to == s.id && up.metric <= maxMetric {
				m := member{Link: Link{From: b.Node(r.name(e.to)), Metric: uint32(max(up.metric, 1)), Local: up.local}, endX: map[int]netip.Addr{}}
				for id, sid := range up.lanEndX {
					if far := r.systems[id+".00"]; far != nil {
						m.endX[b.Node(r.name(far.id))] = sid
					}
				}
				members = append(members, m)
				break
			}
		}
	}
	slices.SortStableFunc(members, func(x, y member) int { return x.From - y.From })
	members = slices.CompactFunc(members, func(x, y member) bool { return x.From == y.From })
	b.lan(r.name(s.id[:15]+"00")+s.id[14:], members)
}

// behavior records an End SID. The first one of each behavior counts.
func (s *isisSystem) behavior(name string, sid netip.Addr) {
	set := func(to *netip.Addr) {
		if !to.IsValid() {
			*to = sid
		}
	}
	switch {
	case strings.HasSuffix(name, "DT46"):
		set(&s.dt6)
		set(&s.dt4)
	case strings.HasSuffix(name, "DT6"):
		set(&s.dt6)
	case strings.HasSuffix(name, "DT4"):
		set(&s.dt4)
	default:
		set(&s.end)
	}
}

func (s *isisSystem) router() bool { return strings.HasSuffix(s.id, ".00") }

// apart reports whether a router's edges for IPv6 and IPv4 differ. Pseudonodes have common edges.
func (s *isisSystem) apart() bool {
	if !s.router() || !s.mt {
		return false
	}
	key := func(all []isisReach) (out []string) {
		for _, e := range all {
			out = append(out, fmt.Sprint(e.to, e.metric))
		}
		slices.Sort(out)
		return out
	}
	return !slices.Equal(key(s.reach[false]), key(s.reach[true]))
}

// edges returns the edges of the IPv6 topology if the network has one and the router takes part, else the common
// ones.
func (s *isisSystem) edges(mt bool) []isisReach {
	if mt && s.mt {
		return s.reach[true]
	}
	return s.reach[false]
}

// subnet returns the router's longest prefix covering a neighbour's address. Both ends of a link announce the same
// one.
func (s *isisSystem) subnet(a netip.Addr) string {
	var best netip.Prefix
	for _, p := range s.prefixes {
		if a.IsValid() && p.Contains(a) && (!best.IsValid() || p.Bits() > best.Bits()) {
			best = p.Prefix
		}
	}
	if !best.IsValid() || best.IsSingleIP() {
		return ""
	}
	return best.String()
}
