// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"io"
	"net/netip"
	"net/url"
	"time"

	"github.com/spf13/cobra"
	"github.com/weir-project/weir/cmd/weir/cli"
	"github.com/weir-project/weir/feature/steer"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/host"
	fmt "github.com/weir-project/weir/internal/printable"
)

func init() {
	cli.Add(cli.Feature{
		Name: spec.Name,
		Overview: []string{
			"weir steer where 192.0.2.7|slot and process of a router's traffic",
			"weir bypass SERVICE|stop steering a service at once",
		},
		Commands: func(g *cli.Globals) []*cobra.Command {
			return []*cobra.Command{steerCommand(g), bindCommand(g), bypassCommand(g)}
		},
		Summary: summarizeSteer,
		Extend:  func(g *cli.Globals) cli.Extension { return &applyResets{g: g} },
		Names:   map[string]func(host.Status) []string{"SERVICE": serviceNames},
		Choices: map[string]cli.Choice{"--slot": slotNumbers, "--to": slotNumbers, "--without": slotNumbers, "--device": deviceNames, "ADDRESS|NAME": deviceNames},
	})
}

// serviceNames returns the names of the steered services.
func serviceNames(st host.Status) (out []string) {
	s, _ := host.Part[state.State](st, spec.Name)
	for _, s := range s.Services {
		out = append(out, s.Name)
	}
	return out
}

// namedService returns the service of a command line: its flag --service or its first argument. Commands without either
// have the only service.
func namedService(cmd *cobra.Command, args []string) string {
	if f := cmd.Flags().Lookup("service"); f != nil {
		return f.Value.String()
	}
	if len(args) > 0 {
		return args[0]
	}
	return ""
}

// slotNumbers completes the slots of a service, with their members.
func slotNumbers(cmd *cobra.Command, g *cli.Globals, args []string) []string {
	return completed(g, func(st host.Status) (out []string) {
		all, _ := host.Part[state.State](st, spec.Name)
		s, err := all.Service(namedService(cmd, args))
		if err != nil {
			return nil
		}
		for _, slot := range s.Slots {
			out = append(out, cobra.CompletionWithDesc(fmt.Sprint(slot.Slot), cmp.Or(slot.Member, "no member")))
		}
		return out
	})
}

// deviceNames completes the sources of a service: their names, else their addresses.
func deviceNames(cmd *cobra.Command, g *cli.Globals, args []string) (out []string) {
	ctx, cancel := context.WithTimeout(context.Background(), completing)
	defer cancel()
	d, err := host.Ask[steer.DeviceReport](ctx, g.Reader(), spec.Name, "devices", url.Values{"service": {namedService(cmd, args)}})
	if err != nil {
		return nil
	}
	for _, dev := range d.Devices {
		out = append(out, cmp.Or(dev.Name, dev.Address.String()))
	}
	return out
}

func steerCommand(g *cli.Globals) *cobra.Command {
	c := &cobra.Command{
		Use: "steer", Short: "Assign traffic to the members of services",
		Long: `Steering assigns the traffic of a service to numbered slots. A source address
hashes to a bucket, and a table maps buckets to slots. The slot's member gets
every protocol of that source. A slot without a member rejects.`,
	}
	c.AddCommand(steerStatus(g), steerWhere(g), steerDevices(g), steerTemplates(g), steerAdmit(g), steerWithdraw(g), steerRegister(g), steerUnregister(g), steerRun(g), steerRetire(g),
		steerMove(g), steerDrain(g), steerUndrain(g), steerReset(g), steerHold(g),
		steerServices(g))
	c.AddCommand(movedToBind()...)
	return c
}

func steerStatus(g *cli.Globals) *cobra.Command {
	c := &cobra.Command{
		Use: "status [SERVICE]", Short: "Show members, counters, queues and drops of every slot", Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			all, err := g.Reader().Status(cmd.Context())
			if err != nil {
				return err
			}
			st, _ := host.Part[state.State](all, spec.Name)
			if len(args) > 0 {
				s, err := st.Service(args[0])
				if err != nil {
					return err
				}
				st.Services = []state.Service{*s}
			}
			if g.JSON {
				return errors.Join(cli.PrintJSON(cmd, steerReport{all.Faults, st}), st.Err())
			}
			cli.PrintFaults(cmd.OutOrStdout(), all.Faults, spec.Name)
			if len(st.Services) == 0 {
				printSummary(cmd.OutOrStdout(), st)
				return st.Err()
			}
			printSteer(cmd.OutOrStdout(), st.Services, time.Now())
			printOutdated(cmd.OutOrStdout(), st.Outdated)
			return st.Err()
		},
	}
	cli.JSONFlag(c, g)
	return c
}

func steerWhere(g *cli.Globals) *cobra.Command {
	var service string
	var what state.WhatIf
	c := &cobra.Command{
		Use: "where ADDRESS|NAME…", Short: "Show bucket, slot and process of source addresses or devices", Args: cobra.MinimumNArgs(1),
		Example: `  weir steer where 192.0.2.7
  weir steer where edge1                    # a device name, with by: device
  weir steer where --slots 5 192.0.2.7      # as if there were five slots
  weir steer where --without 2 192.0.2.7    # as if slot 2 were empty`,
		RunE: func(cmd *cobra.Command, args []string) error {
			for _, a := range args {
				if _, err := netip.ParsePrefix(a); err == nil {
					return cli.Usage(fmt.Errorf("%q is not an IP address", a))
				}
			}
			p, err := host.Ask[steer.WhereReport](cmd.Context(), g.Reader(), spec.Name, "where", what.Values(service, args))
			if err != nil {
				return err
			}
			if g.JSON {
				return cli.PrintJSON(cmd, p)
			}
			printWhere(cmd.OutOrStdout(), p.Addresses)
			return nil
		},
	}
	serviceFlag(c, &service)
	c.Flags().IntVar(&what.Slots, "slots", 0, "compute with this many slots")
	c.Flags().IntSliceVar(&what.Without, "without", nil, "compute with these slots empty")
	cli.JSONFlag(c, g)
	return c
}

func printWhere(w io.Writer, places []state.Assignment) {
	type row struct {
		Address string `table:"ADDRESS"`
		Bucket  int    `table:"BUCKET"`
		Slot    string `table:"SLOT"`
		Member  string `table:"MEMBER,dash"`
		PID     int    `table:"PID,dash"`
	}
	var rows []row
	for _, p := range places {
		slot := fmt.Sprint(p.Slot)
		if p.Moved {
			slot += " (moved)"
		}
		switch {
		case p.Instead != nil:
			slot += fmt.Sprintf(" (empty, meanwhile %d)", *p.Instead)
		case !p.Admitted:
			slot += " (empty)"
		}
		rows = append(rows, row{named(p.Address, p.Device), p.Bucket, slot, p.Member, p.PID})
	}
	cli.PrintRows(w, rows, time.Time{})
}

func printDevices(w io.Writer, devices []state.Device, now time.Time) {
	type row struct {
		Address  string    `table:"ADDRESS"`
		Slot     string    `table:"SLOT"`
		Last     time.Time `table:"LAST"`
		UDP      uint64    `table:"UDP"`
		Rate     string    `table:"UDP/S"`
		Sessions int       `table:"TCP SESSIONS"`
		Bytes    uint64    `table:"TCP DATA,bytes"`
		Connects uint64    `table:"CONNECTS"`
	}
	var rows []row
	for _, d := range devices {
		slot := "-" // for by: flow and the like
		if d.Slot >= 0 {
			slot = fmt.Sprint(d.Slot)
		}
		rows = append(rows, row{named(d.Address, d.Name), slot, d.Last, d.UDP, fmt.Sprintf("%.1f", d.Rate), d.Sessions, d.Bytes, d.Connects})
	}
	cli.PrintRows(w, rows, now)
}

// named formats an address, with the name of its device if it has one.
func named(a netip.Addr, device string) string {
	if device == "" {
		return a.String()
	}
	return device + " " + a.String()
}

func serviceFlag(c *cobra.Command, to *string) {
	c.Flags().StringVar(to, "service", "", "name of the service (required if there are several)")
}

func steerDevices(g *cli.Globals) *cobra.Command {
	var service string
	var f state.DeviceFilter
	slot := -1
	c := &cobra.Command{
		Use: "devices", Short: "List sources with their last packet, rate and protocols", Args: cobra.NoArgs,
		Example: `  weir steer devices --silent 5m      # silent for five minutes
  weir steer devices --missing udp    # with a session, but without flow records`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if slot >= 0 {
				f.Slot = &slot
			}
			if err := f.Check(); err != nil {
				return cli.Usage(err)
			}
			d, err := host.Ask[steer.DeviceReport](cmd.Context(), g.Reader(), spec.Name, "devices", url.Values{"service": {service}})
			if err != nil {
				return err
			}
			now := time.Now()
			kept := []state.Device{}
			for _, dev := range d.Devices {
				if f.Match(dev, now) {
					kept = append(kept, dev)
				}
			}
			d.Devices = kept
			if g.JSON {
				return cli.PrintJSON(cmd, d)
			}
			printDevices(cmd.OutOrStdout(), d.Devices, now)
			if d.Problem != "" {
				fmt.Fprintln(cmd.ErrOrStderr(), d.Problem)
			}
			return nil
		},
	}
	serviceFlag(c, &service)
	c.Flags().DurationVar(&f.Silent, "silent", 0, "only sources silent for this long")
	c.Flags().StringVar(&f.Missing, "missing", "", "only sources never heard over this protocol: udp or tcp")
	c.Flags().IntVar(&slot, "slot", -1, "only sources of this slot")
	cli.JSONFlag(c, g)
	return c
}

// findSlot finds a slot by service name in the pinned state.
func findSlot(cmd *cobra.Command, g *cli.Globals, service string, slot int) (slots.Slot, error) {
	st, err := state.Read(cmd.Context(), g.Host().Root)
	if err != nil {
		return slots.Slot{}, err
	}
	s, err := st.Service(service)
	if err != nil {
		return slots.Slot{}, err
	}
	if slot < 0 {
		return slots.Slot{}, cli.Usage(errors.New("name the slot: --slot N"))
	}
	return slots.Slot{Scope: s.Scope(), Service: s.Name, Slot: slot}, nil
}
