// SPDX-License-Identifier: Apache-2.0

package sharktest

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/gopacket/gopacket/layers"
	"github.com/weir-project/weir/feature/filter/filtertest"
)

// comparable selects random packets with the same dissection in Wireshark and weir. It excludes
// packets reported as broken by Wireshark, fragments, repeated TCP options, and packets inside
// others. It also excludes tags with other fields, or not recognized by weir (0x9100), and headers
// with unread contents in weir. Labelled packets of the generated capture cover these.
const comparable = `not (_ws.malformed or _ws.short or ip.flags.mf == 1 or ipv6.fraghdr.more == 1 or count(tcp.options.mss_val) > 1
	or _ws.expert.group == 0x07000000 or _ws.expert.group == 0x09000000
	or eth.type == 0x9100 or vlan.etype == 0x9100 or ieee8021ad or vlan.etype#3 or ipv6.fraghdr#2 or ipv6.dstopts.nxt#3 or ipv6.routing.nxt#3 or ipv6.hopopts.nxt#3 or ah.next_header#3
	or gre or icmp or icmpv6)`

// Header fields have the same meaning in packets of any kind.
func TestRandom(t *testing.T) {
	needTshark(t)
	t.Parallel()
	const seed = 6 // fixed, because Wireshark's complaints are unpredictable
	r := rand.New(rand.NewPCG(seed, 3))
	some := make([]packet, 7000)
	for i := range some {
		some[i] = packet{label: fmt.Sprint("random packet ", i+1), data: filtertest.Packet(r)}
	}
	c := writeCapture(t, "random packets", layers.LinkTypeEthernet, some)
	comparison{captures: []*capture{c}, pairs: pairs[:headers], only: comparable, least: 600}.run(t)
}
