// SPDX-License-Identifier: Apache-2.0
//! Promises that could have been made: known policies played offline, with the true device and full
//! knowledge.
//!
//! A set of streams is servable if one of the policies keeps every frame in time. The policies are
//! earliest deadline first, rounds in position order (C-SCAN), and mixtures of both: grouped
//! sweeping takes the nearest ahead among those due within a window. Each comes with several
//! lengths of round, two ways to share the buffers and two ways to start. One more policy is least
//! slack first. Delays of daemon and door do not count, so the oracle is a little better than any
//! server can be.

use crate::disk::positioning_ns;
use rushes_core::server::DeviceModel;
use rushes_core::units::*;

/// A stream in a question to the oracle.
#[derive(Clone, Copy, Debug)]
pub struct Ask {
    /// When it starts.
    pub start: Instant,
    /// Its rate.
    pub rate: BytesPerSecond,
    /// The position of its file on the device.
    pub position: u64,
    /// Time from frame to frame.
    pub period: Duration,
    /// How late a first frame may be.
    pub preroll: Duration,
}

/// The order of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// Nearest ahead among those due within so many thousandths of a round; 0: earliest deadline
    /// first.
    Window(u64),
    /// Least slack: deadline less the duration of its visit.
    Slack,
}

/// A policy.
#[derive(Clone, Copy, Debug)]
struct Plan {
    round: Duration,
    order: Order,
    /// Divides the buffers by the root of the rate, instead of by the rate.
    root: bool,
    /// First visit to a newcomer; it doubles until the full size.
    first_bytes: u64,
}

/// Longest request that cannot be taken back, like the server's. Units: bytes.
const CHUNK_BYTES: u64 = 4 << 20;

#[derive(Clone, Copy)]
struct Flow {
    ask: Ask,
    fetched: u64,
    cap: u64,
    visit: u64,
    frame_bytes: u64,
}

impl Flow {
    fn due(&self) -> Instant {
        let frame = self.fetched / self.frame_bytes;
        self.ask.start + self.ask.preroll + self.ask.period.times(frame)
    }

    /// Bytes the player has taken by `now`.
    fn taken(&self, now: Instant) -> u64 {
        let frames = now.since(self.ask.start).0 / self.ask.period.0 + 1;
        (frames * self.frame_bytes).min(self.fetched / self.frame_bytes * self.frame_bytes)
    }

    fn room(&self, now: Instant) -> u64 {
        self.cap.saturating_sub(self.fetched - self.taken(now))
    }
}

/// Plays policies; keeps its memory between questions.
pub struct Oracle {
    device: DeviceModel,
    cache: u64,
    horizon: Instant,
    plans: Vec<Plan>,
    flows: Vec<Flow>,
    /// Sets that it has checked, for the report.
    pub set_count: u64,
}

impl Oracle {
    /// For `device` and a cache of so many bytes; streams play until `horizon`.
    pub fn new(device: DeviceModel, cache: u64, horizon: Instant) -> Oracle {
        let mut plans = Vec::new();
        let orders = [1000, 0, 500, 250].map(Order::Window);
        for order in orders.into_iter().chain([Order::Slack]) {
            for round_ms in [1500, 2000, 1000, 3000, 6000, 500] {
                for root in [false, true] {
                    for first_bytes in [1 << 20, 4 << 20] {
                        plans.push(Plan {
                            round: Duration::from_ms(round_ms),
                            order,
                            root,
                            first_bytes,
                        });
                    }
                }
            }
        }
        Oracle {
            device,
            cache,
            horizon,
            plans,
            flows: Vec::new(),
            set_count: 0,
        }
    }

    /// True when a known policy keeps all of them in time.
    pub fn servable(&mut self, asks: &[Ask]) -> bool {
        self.set_count += 1;
        if self.hopeless(asks) {
            return false;
        }
        let same = asks.windows(2).all(|two| two[0].rate == two[1].rate);
        for index in 0..self.plans.len() {
            let plan = self.plans[index];
            // With equal rates these give the same result as others.
            if same && (plan.root || plan.order == Order::Slack) {
                continue;
            }
            if self.keeps(asks, plan) {
                // A plan that worked is likely to work for the next set.
                self.plans[..=index].rotate_right(1);
                return true;
            }
        }
        false
    }

    /// No order of requests can do it: transfer and the least positioning exceed the device.
    fn hopeless(&self, asks: &[Ask]) -> bool {
        let model = self.device.read;
        let mut transfer = 0.0;
        let mut roots = 0.0;
        for ask in asks {
            transfer += ask.rate.0 as f64 / model.rate.0 as f64;
            roots += (ask.rate.0 as f64).sqrt();
        }
        // The best split of buffers is proportional to the roots; a visit fetches at most twice the
        // average buffer.
        let positioning = roots * roots * model.fixed.0 as f64 / 1e9 / (2.0 * self.cache as f64);
        // Over a finite time the preroll helps by its share.
        let span = self.horizon.0.max(1) as f64;
        let preroll = asks.iter().map(|ask| ask.preroll.0).max().unwrap_or(0) as f64;
        transfer + positioning > 1.0 + preroll / span
    }

    fn keeps(&mut self, asks: &[Ask], plan: Plan) -> bool {
        self.flows.clear();
        let weight = |ask: &Ask| {
            let rate = ask.rate.0 as f64;
            if plan.root { rate.sqrt() } else { rate }
        };
        let total: f64 = asks.iter().map(weight).sum();
        for ask in asks {
            let frame_bytes = ask.rate.bytes_in(ask.period).0.max(1);
            let cap = (self.cache as f64 * weight(ask) / total) as u64;
            let visit = ask.rate.bytes_in(plan.round).0.min(cap * 9 / 10);
            if visit < frame_bytes {
                return false;
            }
            self.flows.push(Flow {
                ask: *ask,
                fetched: 0,
                cap,
                visit,
                frame_bytes,
            });
        }
        let mut now = Instant::ZERO;
        let mut head = 0;
        while now < self.horizon {
            let Some(index) = self.choose(now, head, plan) else {
                match self.next_chance(now) {
                    Some(at) => now = at,
                    None => return true,
                }
                continue;
            };
            if !self.visit(index, &mut now, &mut head, plan) {
                return false;
            }
        }
        true
    }

    /// No stream has room: the instant when one will.
    fn next_chance(&self, now: Instant) -> Option<Instant> {
        let mut next: Option<Instant> = None;
        for flow in &self.flows {
            let at = if flow.ask.start > now {
                flow.ask.start
            } else {
                now + flow.ask.period
            };
            next = Some(next.map_or(at, |n| n.min(at)));
        }
        next
    }

    fn choose(&self, now: Instant, head: u64, plan: Plan) -> Option<usize> {
        let ready = |flow: &&Flow| flow.ask.start <= now && flow.room(now) >= flow.visit / 2;
        let earliest = self.flows.iter().filter(ready).map(Flow::due).min()?;
        let window = match plan.order {
            Order::Window(permille) => Duration(plan.round.0 / 1000 * permille),
            Order::Slack => Duration::ZERO,
        };
        let late_by = earliest + window;
        let mut best: Option<(u64, usize)> = None;
        for (index, flow) in self.flows.iter().enumerate() {
            if !ready(&flow) {
                continue;
            }
            let key = match plan.order {
                Order::Slack => {
                    let visit = self.device.read.rate.time_for(ByteCount(flow.visit));
                    flow.due().before(visit).0
                }
                Order::Window(0) => flow.due().0,
                Order::Window(_) if flow.due() <= late_by => {
                    (flow.ask.position + flow.fetched).wrapping_sub(head)
                }
                Order::Window(_) => continue,
            };
            if best.is_none_or(|b| (key, index) < b) {
                best = Some((key, index));
            }
        }
        best.map(|(_, index)| index)
    }

    /// Reads for one stream; false when a frame came too late.
    fn visit(&mut self, index: usize, now: &mut Instant, head: &mut u64, plan: Plan) -> bool {
        let flow = &mut self.flows[index];
        let ramp = plan.first_bytes.max(flow.fetched);
        let mut left = flow.visit.min(ramp).min(flow.room(*now).max(1));
        while left > 0 {
            let bytes = left.min(CHUNK_BYTES);
            let at = flow.ask.position + flow.fetched;
            let model = &self.device.read;
            let position = positioning_ns(model, self.device.size, *head, at);
            *now = *now + Duration(position) + model.rate.time_for(ByteCount(bytes));
            *head = at + bytes;
            let due = flow.due();
            let before = flow.fetched / flow.frame_bytes;
            flow.fetched += bytes;
            if flow.fetched / flow.frame_bytes > before && *now > due {
                return false;
            }
            left -= bytes;
        }
        true
    }

    /// The largest number of streams servable together. Up to six asks: of all subsets; beyond: the
    /// slowest ones first, or first come first served, whichever keeps more.
    pub fn largest(&mut self, asks: &[Ask], first_come: usize) -> usize {
        if asks.len() > 6 {
            let mut slow_first = asks.to_vec();
            slow_first.sort_by_key(|ask| ask.rate);
            let mut kept = 0;
            let mut refused = asks.len() + 1;
            // Halving: more slow streams are never easier.
            while refused - kept > 1 {
                let middle = (kept + refused) / 2;
                let mut set = slow_first[..middle].to_vec();
                set.sort_by_key(|ask| ask.start);
                if self.servable(&set) {
                    kept = middle;
                } else {
                    refused = middle;
                }
            }
            return kept.max(first_come);
        }
        let mut masks: Vec<u32> = (1..1u32 << asks.len()).collect();
        masks.sort_by_key(|mask| std::cmp::Reverse(mask.count_ones()));
        for mask in masks {
            let size = mask.count_ones() as usize;
            if size <= first_come {
                break;
            }
            let set: Vec<Ask> = (0..asks.len())
                .filter(|index| mask & (1 << index) != 0)
                .map(|index| asks[index])
                .collect();
            if self.servable(&set) {
                return size;
            }
        }
        first_come
    }

    /// The streams kept if each is admitted in its turn, provided it fits with those before.
    pub fn first_come(&mut self, asks: &[Ask]) -> Vec<bool> {
        let mut set: Vec<Ask> = Vec::new();
        asks.iter()
            .map(|ask| {
                set.push(*ask);
                let kept = self.servable(&set);
                if !kept {
                    set.pop();
                }
                kept
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::table5;

    fn asks(count: u64, gap_ms: u64) -> Vec<Ask> {
        (0..count)
            .map(|index| Ask {
                start: Instant::ZERO + Duration::from_ms(index * gap_ms),
                rate: BytesPerSecond(12_500_000),
                position: index * 40_000_000_000 / count,
                period: Duration::from_ms(40),
                preroll: Duration::from_ms(500),
            })
            .collect()
    }

    #[test]
    fn thirteen_of_the_possible_13_7_can_be_kept() {
        let horizon = Instant::ZERO + Duration::from_s(60);
        let mut oracle = Oracle::new(table5(), 1 << 30, horizon);
        assert!(oracle.servable(&asks(12, 250)));
        assert!(!oracle.servable(&asks(14, 250)));
        assert!(oracle.servable(&asks(13, 250)));
    }

    #[test]
    fn a_smaller_cache_keeps_fewer() {
        let horizon = Instant::ZERO + Duration::from_s(40);
        let mut small = Oracle::new(table5(), 64 << 20, horizon);
        let kept = small.largest(&asks(14, 250), 0);
        assert!((8..=12).contains(&kept), "{kept}");
    }

    #[test]
    fn the_best_subset_leaves_out_the_greedy_one() {
        let horizon = Instant::ZERO + Duration::from_s(20);
        let mut oracle = Oracle::new(table5(), 1 << 30, horizon);
        let mut mixed = asks(5, 250);
        mixed[0].rate = BytesPerSecond(160_000_000);
        assert_eq!(oracle.largest(&mixed, 0), 4);
        assert_eq!(
            oracle.first_come(&mixed),
            [true, false, false, false, false]
        );
    }
}
