// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"io"
	"maps"
	"slices"

	"github.com/spf13/cobra"
	"github.com/weir-project/weir/cmd/weir/cli"
	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/reset"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/host"
	fmt "github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/kernel"
)

// outageFlag is --allow-outage. Without it a command fails if it would take traffic away.
type outageFlag bool

func (f *outageFlag) add(c *cobra.Command) {
	c.Flags().BoolVar((*bool)(f), "allow-outage", false, "make the change even if it takes traffic from its receiver")
}

// checked makes a change while holding the lock, unless it would take traffic of the service away.
func (f outageFlag) checked(cmd *cobra.Command, g *cli.Globals, scope, name string, outages func(*state.Service) (feature.Plan, error), change func(l *kernel.WriteLock) error) error {
	return locked(cmd, g, func(l *kernel.WriteLock) error {
		if f {
			return change(l) // also if the outages are unknown
		}
		s, err := state.ReadOne(l.Root, scope, name)
		if err != nil {
			return err
		}
		plan, err := outages(s)
		if err != nil {
			return err
		}
		if err := plan.Refuse(false); err != nil {
			return err
		}
		return change(l)
	})
}

// tellOutages prints the traffic lost by a change of a service.
func tellOutages(cmd *cobra.Command, s *state.Service, outages func(*state.Service) (feature.Plan, error)) error {
	plan, err := outages(s)
	if err == nil {
		printOutages(cmd, plan)
	}
	return err
}

// resetFlags are the flags of commands that can misplace sessions.
type resetFlags struct {
	rate spec.Rate
	dry  bool
	cmd  *cobra.Command
}

func (f *resetFlags) addRate(c *cobra.Command) {
	f.cmd = c
	c.Flags().Var(&f.rate, "rate", "rate of resets of misplaced sessions, like 5/s; 0 leaves all sessions in place\n(default: the service's reset_rate)")
	c.Flags().Lookup("rate").DefValue = ""
}

func (f *resetFlags) add(c *cobra.Command) {
	f.addRate(c)
	c.Flags().BoolVar(&f.dry, "dry-run", false, "list the routers whose sessions would be reset, change nothing")
}

// given returns the rate of the command line, or nil.
func (f *resetFlags) given() *spec.Rate {
	if !f.cmd.Flags().Changed("rate") {
		return nil
	}
	return &f.rate
}

// resetDue resets the sessions misplaced by a change, and prints each session.
func (f *resetFlags) resetDue(g *cli.Globals) error {
	if r := f.given(); r != nil && *r == 0 {
		return nil
	}
	return resetDue(f.cmd, g, f.given())
}

func resetDue(cmd *cobra.Command, g *cli.Globals, rate *spec.Rate) error {
	h := g.Host()
	err := reset.ResetDue(cmd.Context(), h.Root, rate, steer.HandBy(host.Mover(keeperSocket(g))), func(r reset.Reset) { printReset(cmd.OutOrStdout(), r) })
	return kernel.Stopped(cmd.Context(), err, inForce)
}

// change runs a change of steering that can misplace sessions. It moves sessions where their members allow, and resets
// the others.
func (f *resetFlags) change(g *cli.Globals, foresee func() ([]steer.Foreseen, error), change func() error) error {
	if r := f.given(); r != nil && *r == 0 {
		return change() // --rate 0 leaves sessions in place
	}
	err := steer.Switch(f.cmd.Context(), g.Host().Root, host.Mover(keeperSocket(g)), foresee, change, func(s steer.Handed) {
		fmt.Fprintf(f.cmd.OutOrStdout(), "moved session of %s: %s of %s\n", s.Router(), s.Slots(), s.Service)
	})
	if err != nil {
		return err
	}
	return f.resetDue(g)
}

func printReset(w io.Writer, r reset.Reset) {
	if r.Handed {
		fmt.Fprintf(w, "moved session of %s: %s of %s\n", r.Router(), r.Slots(), r.Service)
		return
	}
	if r.Err != nil {
		fmt.Fprintf(w, "session of %s is misplaced (%s of %s): %v\n", r.Router(), r.Slots(), r.Service, r.Err)
		return
	}
	fmt.Fprintf(w, "reset session of %s: %s of %s (%d of %d)\n", r.Router(), r.Slots(), r.Service, r.Done, r.Of)
}

// tellForeseen prints the effect of a change on sessions.
func tellForeseen(cmd *cobra.Command, g *cli.Globals, all ...steer.Foreseen) {
	printForeseen(cmd.OutOrStdout(), steer.Movable(cmd.Context(), host.Mover(keeperSocket(g))), all...)
}

func printForeseen(w io.Writer, movable func(service string, s state.Session) bool, all ...steer.Foreseen) {
	for _, f := range all {
		for _, d := range f.Devices {
			fmt.Fprintf(w, "would move %s: slot %d → %d of %s\n", d, d.From, d.To, f.Service)
		}
		for _, s := range f.Sessions {
			verb := "reset"
			if movable(f.Service, s) {
				verb = "move"
			}
			fmt.Fprintf(w, "would %s session of %s: %s of %s\n", verb, s.Router(), s.Slots(), f.Service)
		}
		if f.Problem != "" {
			fmt.Fprintf(w, "cannot determine the sessions of %s to be reset: %s\n", f.Service, f.Problem)
		}
	}
}

// pinned returns a service as pinned.
func pinned(cmd *cobra.Command, g *cli.Globals, name string) (*state.Service, error) {
	st, err := state.Read(cmd.Context(), g.Host().Root)
	if err != nil {
		return nil, err
	}
	return st.Service(name)
}

func steerMove(g *cli.Globals) *cobra.Command {
	var m record.Moving
	var resets resetFlags
	var allow outageFlag
	c := &cobra.Command{
		Use: "move SERVICE {--device ADDRESS | --bucket N} {--to SLOT | --back}", DisableFlagsInUseLine: true, Short: "Move a device or bucket to another slot, or back", Args: cobra.ExactArgs(1),
		Long: `Move one device, or one of the 4096 buckets, to another slot for every protocol at
once, or back to its normal slot. The move survives weir apply. The router's TCP
sessions move along if their member hands over sessions (see weir handoff).
Otherwise they are reset, so all traffic of the router stays together. A move of
served traffic to an empty slot that rejects fails, unless --allow-outage is
given.`,
		Example: `  weir steer move telemetry --device 192.0.2.7 --to 2
  weir steer move telemetry --device edge1.fra --back
  weir steer move telemetry --bucket 1234 --to 0 --dry-run`,
		RunE: func(cmd *cobra.Command, args []string) error {
			flags := cmd.Flags()
			if flags.Changed("device") == flags.Changed("bucket") || m.Device == "" && flags.Changed("device") {
				return cli.Usage(errors.New("name what to move: --device ADDRESS, or --bucket N"))
			}
			if flags.Changed("to") == m.Back {
				return cli.Usage(errors.New("name the destination: --to SLOT, or --back"))
			}
			s, err := pinned(cmd, g, args[0])
			if err != nil {
				return err
			}
			outages := func(s *state.Service) (feature.Plan, error) { return steer.OutagesOfMove(g.Host().Root, s, m) }
			if resets.dry {
				f, err := steer.ForeseeMove(cmd.Context(), g.Host().Root, s, m)
				tellForeseen(cmd, g, f)
				if err == nil {
					err = tellOutages(cmd, s, outages)
				}
				return err
			}
			return resets.change(g, func() ([]steer.Foreseen, error) {
				f, err := steer.ForeseeMove(cmd.Context(), g.Host().Root, s, m)
				return []steer.Foreseen{f}, err
			}, func() error {
				return allow.checked(cmd, g, s.Scope(), s.Name, outages, func(l *kernel.WriteLock) error { return engine.Move(l, s.Scope(), s.Name, m, resets.given()) })
			})
		},
	}
	c.Flags().StringVar(&m.Device, "device", "", "source address, or name of a device")
	c.Flags().IntVar(&m.Bucket, "bucket", 0, "number of a bucket, 0 to 4095")
	c.Flags().IntVar(&m.To, "to", 0, "number of the slot")
	c.Flags().BoolVar(&m.Back, "back", false, "end the move: return to the normal slot")
	resets.add(c)
	c.Flags().Lookup("dry-run").Usage = "list the routers that would move, sessions that would be reset\nand traffic that would be lost, change nothing"
	allow.add(c)
	return c
}

func steerDrain(g *cli.Globals) *cobra.Command {
	return drainCommand(g, false, &cobra.Command{
		Use: "drain SERVICE --slot N", Short: "Give a slot's traffic to the other slots until undrain",
		Long: `Give a slot's traffic to the other slots, as with weight 0, until weir steer
undrain. Its member stays. The drain survives weir apply. Its TCP sessions move
along if the member hands over sessions (see weir handoff). Others are reset at a
limited rate and reconnect at their router's new slot. The command fails if some
traffic would go to an empty slot (on_empty: reject or drop), unless
--allow-outage is given.`,
		Example: `  weir steer drain telemetry --slot 3 --dry-run   # lists the routers
  weir steer drain telemetry --slot 3 --rate 20/s`,
	})
}

func steerUndrain(g *cli.Globals) *cobra.Command {
	return drainCommand(g, true, &cobra.Command{
		Use: "undrain SERVICE --slot N", Short: "Give a drained slot its traffic back",
		Long: `Give a drained slot its traffic back. The command fails while the slot is empty
and rejects: start its member first, or give --allow-outage.`,
		Example: `  weir steer undrain telemetry --slot 3`,
	})
}

func drainCommand(g *cli.Globals, back bool, c *cobra.Command) *cobra.Command {
	slot := -1
	var resets resetFlags
	var allow outageFlag
	c.Args = cobra.ExactArgs(1)
	c.RunE = func(cmd *cobra.Command, args []string) error {
		named, err := findSlot(cmd, g, args[0], slot)
		if err != nil {
			return err
		}
		foresee := func() (f steer.Foreseen, err error) {
			s, err := pinned(cmd, g, args[0])
			if err != nil {
				return f, err
			}
			return steer.ForeseeDrain(cmd.Context(), g.Host().Root, s, slot, back)
		}
		outages := func(s *state.Service) (feature.Plan, error) {
			return steer.OutagesOfDrain(g.Host().Root, s, slot, back)
		}
		if resets.dry {
			f, err := foresee()
			tellForeseen(cmd, g, f)
			if err != nil {
				return err
			}
			s, err := pinned(cmd, g, args[0])
			if err != nil {
				return err
			}
			return tellOutages(cmd, s, outages)
		}
		return resets.change(g, func() ([]steer.Foreseen, error) {
			f, err := foresee()
			return []steer.Foreseen{f}, err
		}, func() error {
			return allow.checked(cmd, g, named.Scope, named.Service, outages, func(l *kernel.WriteLock) error {
				if back {
					return engine.Undrain(l, named, resets.given())
				}
				return engine.Drain(l, named, resets.given())
			})
		})
	}
	c.Flags().IntVar(&slot, "slot", -1, "number of the slot")
	resets.add(c)
	c.Flags().Lookup("dry-run").Usage = "list the routers that would move, sessions that would be reset\nand traffic that would be lost, change nothing"
	allow.add(c)
	return c
}

func steerReset(g *cli.Globals) *cobra.Command {
	var resets resetFlags
	c := &cobra.Command{
		Use: "reset SERVICE", Short: "Reset misplaced TCP sessions (not at their router's slot)", Args: cobra.ExactArgs(1),
		Long: `Reset misplaced TCP sessions. A session is misplaced if its member does not serve
the slot of its router. Changes reset misplaced sessions by themselves. This
command is for sessions left in place with --rate 0.`,
		Example: `  weir steer reset telemetry --dry-run
  weir steer reset telemetry --rate 20/s`,
		RunE: func(cmd *cobra.Command, args []string) error {
			s, err := pinned(cmd, g, args[0])
			if err != nil {
				return err
			}
			if resets.dry {
				found, err := s.Misplaced(cmd.Context())
				f := steer.Foreseen{Service: s.Name, Sessions: append([]state.Session{}, found...)}
				if g.JSON && err == nil {
					return cli.PrintJSON(cmd, f)
				}
				tellForeseen(cmd, g, f)
				return err
			}
			rate := spec.DefaultResetRate
			if given := resets.given(); given != nil {
				if rate = *given; rate == 0 {
					return cli.Usage(errors.New("--rate 0 resets nothing: give a rate like 5/s"))
				}
			} else if own := s.ResetRate(); own != 0 {
				rate = own
			}
			return reset.ResetService(cmd.Context(), g.Host().Root, s.Scope(), s.Name, rate, steer.HandBy(host.Mover(keeperSocket(g))),
				func(r reset.Reset) { printReset(cmd.OutOrStdout(), r) })
		},
	}
	resets.add(c)
	cli.JSONFlag(c, g)
	c.Flags().Lookup("json").Usage = "print JSON, with --dry-run"
	return c
}

func bypassCommand(g *cli.Globals) *cobra.Command {
	off, all := false, false
	var allow outageFlag
	c := &cobra.Command{
		Use: "bypass {SERVICE | --all}", Short: "Stop steering a service at once; --off steers it again", Args: cobra.MaximumNArgs(1),
		Long: `Leave a service's traffic to the kernel at once, as without weir: no packet of it
is steered, rejected or counted. The service stays configured and bypassed, also
after weir apply, until --off. Use it to rule weir out during an incident. --off
fails if it would take traffic from a process and give it to an empty slot, unless
--allow-outage is given. --all bypasses every service with slots, in all network
namespaces. It needs neither the configuration file nor weir serve.`,
		Example: `  weir bypass telemetry
  weir bypass --all
  weir bypass --off telemetry`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if all == (len(args) == 1) {
				return cli.Usage(errors.New("name one service, or give --all: weir bypass SERVICE"))
			}
			if bool(allow) && !off {
				return cli.Usage(errors.New("--allow-outage goes with --off: a bypass is never refused"))
			}
			if all {
				return bypassAll(cmd, g, !off, allow)
			}
			s, err := pinned(cmd, g, args[0])
			if err != nil {
				return err
			}
			did := false
			set := func(l *kernel.WriteLock) (err error) {
				did, err = engine.Bypass(l, s.Scope(), s.Name, !off)
				return err
			}
			if off {
				err = allow.checked(cmd, g, s.Scope(), s.Name, steer.OutagesOfSteering, set)
			} else {
				err = locked(cmd, g, set)
			}
			if err != nil {
				return err
			}
			out := cmd.OutOrStdout()
			switch {
			case !did && off:
				fmt.Fprintf(out, "%s is not bypassed\n", s.Name)
			case !did:
				fmt.Fprintf(out, "%s is bypassed already\n", s.Name)
			case off:
				fmt.Fprintf(out, "%s is steered again\n", s.Name)
				return resetDue(cmd, g, nil)
			default:
				fmt.Fprintf(out, "%s is bypassed: the kernel alone chooses, until weir bypass --off %s\n", s.Name, s.Name)
				for _, w := range s.WithoutSteering() {
					fmt.Fprintf(cmd.ErrOrStderr(), "warning: %s\n", w)
				}
			}
			return nil
		},
	}
	c.Flags().BoolVar(&off, "off", false, "steer it again")
	c.Flags().BoolVar(&all, "all", false, "every service with slots, in all network namespaces")
	allow.add(c)
	return cut{remedy: "run the command again to finish it"}.of(c)
}

// refuseSteering returns an error if steering all services again would take traffic away.
func refuseSteering(cmd *cobra.Command, g *cli.Globals, allow outageFlag) error {
	if allow {
		return nil // also if the outages are unknown
	}
	plan, failed, err := steer.OutagesOfSteeringAll(cmd.Context(), g.Host().Root)
	if err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(failed)) {
		fmt.Fprintf(cmd.ErrOrStderr(), "warning: cannot determine the traffic taken away by service %s: %v\n", name, failed[name])
	}
	return plan.Refuse(false)
}

// bypassAll bypasses all services, or steers them again. A failure of one service does not stop the others.
func bypassAll(cmd *cobra.Command, g *cli.Globals, on bool, allow outageFlag) error {
	var did []string
	err := locked(cmd, g, func(l *kernel.WriteLock) (err error) {
		if !on {
			if err := refuseSteering(cmd, g, allow); err != nil {
				return err
			}
		}
		did, err = steer.BypassAll(cmd.Context(), l, on)
		return err
	})
	out := cmd.OutOrStdout()
	for _, name := range did {
		if on {
			fmt.Fprintf(out, "%s is bypassed: the kernel alone chooses, until weir bypass --off %s\n", name, name)
		} else {
			fmt.Fprintf(out, "%s is steered again\n", name)
		}
	}
	if err != nil {
		return err
	}
	if len(did) == 0 {
		fmt.Fprintln(out, "nothing to change")
	}
	if !on {
		return resetDue(cmd, g, nil)
	}
	st, err := state.Read(cmd.Context(), g.Host().Root)
	if err != nil {
		fmt.Fprintln(cmd.ErrOrStderr(), "cannot determine the members unreachable without steering:", err)
		return nil
	}
	for i := range st.Services {
		for _, w := range st.Services[i].WithoutSteering() {
			fmt.Fprintln(cmd.ErrOrStderr(), "warning:", w)
		}
	}
	return nil
}
